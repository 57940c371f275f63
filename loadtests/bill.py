"""What the bill costs: the same server with ledger and metrics, and without, side by side.

Both servers run at once and are measured in turns, with `make bench`'s uniform workload, so that
what else the machine does meets both alike.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import text_format
from rich.console import Console
from tritonclient.grpc import model_config_pb2

from backend.models.loader import resolve
from backend.serve import ROOT, TritonServer
from backend.tokenizer import Tokenizer
from loadtests.bench import Prompts, read_config, served, uniform_workload


def write_repository(repository: Path, with_bill: bool) -> None:
    """The project's own model folder, with a ledger and all metrics or with neither."""
    source = ROOT / "model_repository/smollm2"
    config = text_format.Parse(
        (source / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
    )
    if with_bill:
        config.parameters["ledger_path"].string_value = str(repository / "ledger")
        config.parameters["REPORT_CUSTOM_METRICS"].string_value = "true"
    config.parameters["kv_cache_memory"].string_value = "512MiB"
    version = repository / "smollm2/1"
    version.mkdir(parents=True)
    (repository / "smollm2/config.pbtxt").write_text(text_format.MessageToString(config))
    (version / "model.py").write_text((source / "1/model.py").read_text())


@contextlib.contextmanager
def running(port: int, with_bill: bool) -> Iterator[TritonServer]:
    with tempfile.TemporaryDirectory() as directory:
        repository, log = Path(directory) / "models", Path(directory) / "log"
        write_repository(repository, with_bill)
        arguments = [] if with_bill else ["--allow-metrics=false"]
        with (
            log.open("wb") as output,
            TritonServer(
                repository, port, port + 1, port + 2, arguments=arguments, log=output
            ) as server,
        ):
            yield server


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bill", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    options = parser.parse_args()
    console = Console(highlight=False)
    requests = uniform_workload(Prompts(Tokenizer(resolve(read_config().model))))
    requests = requests[: options.requests]
    ratios = []
    with running(8110, with_bill=True) as billed, running(8120, with_bill=False) as plain:
        servers = {"with": billed, "without": plain}
        for server in servers.values():
            served(server, requests[:2], 2)  # warm
        for i in range(options.rounds):
            speeds = {}
            for name in sorted(servers, reverse=i % 2 == 0):
                result = served(servers[name], requests, options.concurrency)
                speeds[name] = result.tokens_per_second
            ratios.append(speeds["with"] / speeds["without"])
            console.print(
                f"with {speeds['with']:.1f} tokens/s, without {speeds['without']:.1f}: "
                f"{ratios[-1]:.3f}"
            )
    console.print(f"median of {len(ratios)} rounds: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
