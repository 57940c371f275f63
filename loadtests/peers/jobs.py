"""The controlling side of a peer: its job as JSON, its process, its results."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tritium.loadtests.results import Result

# Workload -> requests: [token ids of the prompt, number of output tokens].
Workloads = Mapping[str, Sequence[tuple[list[int], int]]]


class PeerError(RuntimeError):
    """A peer did not start or did not answer; its log says why."""


def write_job(path: Path, settings: Mapping[str, Any], workloads: Workloads) -> None:
    path.write_text(json.dumps({"settings": dict(settings), "workloads": dict(workloads)}))


def result_of(
    answer: str,
    variant: str,
    concurrency: int,
    workload: str,
    requests: Sequence[tuple[list[int], int]],
) -> Result:
    """Parse a peer's answer to one cell.

    The line is {"seconds": ..., "moments": [[start, first token, last token], ...]}, in the order
    of the requests, by the peer's clock.

    Raises:
        PeerError: the line has another form.
    """
    try:
        fields = json.loads(answer)
        result = Result(variant, concurrency, workload, seconds=fields["seconds"])
        for (_, num_tokens), (start, first, end) in zip(requests, fields["moments"], strict=True):
            result.add(start, first, end, num_tokens)
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"{variant} answered {answer[:200]!r}: {error}") from error
    return result


class Peer:
    """A peer's process, which stays for the whole run and is frozen while others are measured.

    Args:
        name: Name in tables.
        python: Interpreter of the peer's environment.
        script: Program in this folder.
        settings: Arguments of the program's `start`.
        folder: Folder for the job and the log.
        environment: More environment variables.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        script: str,
        settings: Mapping[str, Any],
        workloads: Workloads,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._workloads = workloads
        slug = name.replace(" ", "-")
        self.log = folder / f"{slug}.log"
        job = folder / f"{slug}.job.json"
        write_job(job, settings, workloads)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), str(Path(__file__).parent / script), str(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                text=True,
                start_new_session=True,  # so that all of its processes can be frozen
            )
        try:
            self.version = str(json.loads(self._read())["version"])
        except BaseException:
            self.stop()
            raise

    def measure(self, workload: str, num_requests: int, concurrency: int) -> Result:
        requests = self._workloads[workload][:num_requests]
        cell = {"workload": workload, "num_requests": num_requests, "concurrency": concurrency}
        _pipe(self._process.stdin).write(json.dumps(cell) + "\n")
        _pipe(self._process.stdin).flush()
        return result_of(self._read(), self.name, concurrency, workload, requests)

    def freeze(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _read(self) -> str:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise PeerError(f"{self.name} ended; its log is {self.log}")
        return line


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe
    return pipe
