"""Sends planned requests at their times, whatever is in flight, and records the responses.

It uses plain threads, which locust turns into greenlets.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable

from tritium.client import Client, ConnectionLost, GenerationError, GrpcClient, HttpClient
from tritium.loadtests.replay.plan import Planned
from tritium.loadtests.replay.prompts import Prompts
from tritium.loadtests.replay.run import Health, Record
from tritium.loadtests.statistics import percentile

_AHEAD = 512  # prompts written ahead of their time
_BEAT = 0.01  # seconds
_CONNECT_TIMEOUT = 10.0  # seconds


def connect(url: str, model: str) -> Client:
    """A client over HTTP (http://host:port) or gRPC (host:port)."""
    return HttpClient(url, model) if url.startswith("http://") else GrpcClient(url, model)


class Dispatcher:
    """Replays one share of a plan.

    Args:
        requests: Requests in the order of their times.
        prompts: Writes the prompts.
        client: Sends the requests.
        timeout: Seconds for a whole answer.
        on_record: Called with each record when its request has ended, on any thread.
    """

    def __init__(
        self,
        requests: Iterable[Planned],
        prompts: Prompts,
        client: Client,
        timeout: float,
        on_record: Callable[[Record], None],
    ) -> None:
        self._requests = requests
        self._prompts = prompts
        self._client = client
        self._timeout = timeout
        self._on_record = on_record
        self._ready: queue.Queue[tuple[Planned, str] | Exception | None] = queue.Queue(_AHEAD)
        self._full = threading.Event()  # set when enough prompts are written ahead
        threading.Thread(target=self._write_ahead, daemon=True).start()

    def wait_until_ready(self) -> None:
        """Block until the server answers and the first prompts are written.

        Raises:
            ConnectionLost: the server does not answer.
        """
        self._client.connect(_CONNECT_TIMEOUT)
        self._full.wait()

    def run(self, start: float) -> Health:
        """Send all requests and wait for their ends.

        Args:
            start: time.perf_counter() at the plan's time 0.

        Raises:
            ValueError, TraceError: a request can't be planned or written.
        """
        pulse = _Pulse()
        threads: list[threading.Thread] = []
        while (ready := self._ready.get()) is not None:
            if isinstance(ready, Exception):
                raise ready
            request, prompt = ready
            time.sleep(max(start + request.due - time.perf_counter(), 0))
            thread = threading.Thread(target=self._send, args=(request, prompt, start), daemon=True)
            thread.start()
            threads = [thread for thread in threads if thread.is_alive()] + [thread]
        for thread in threads:
            thread.join()
        return pulse.stop()

    def _write_ahead(self) -> None:
        try:
            for request in self._requests:
                self._ready.put((request, self._prompts.write(request)))
                if self._ready.full():
                    self._full.set()
            self._ready.put(None)
        except Exception as error:  # noqa: BLE001 -- raised where prompts are taken
            self._ready.put(error)
        self._full.set()

    def _send(self, request: Planned, prompt: str, start: float) -> None:
        record = Record(
            request.index,
            request.due,
            request.input_length,
            request.output_length,
            request.business_line,
            request.request_class,
        )
        sampling = {"max_tokens": request.output_length, "ignore_eos": True, "temperature": 0}
        record.sent = time.perf_counter() - start
        try:
            self._receive(record, request, prompt, sampling, start)
        except GenerationError as error:
            record.error = str(error)
            lost = isinstance(error, ConnectionLost)
            record.rejected = error.code == "UNAVAILABLE" and not lost and not record.first
        except TimeoutError as error:
            record.error = f"DEADLINE_EXCEEDED: {error}"
        except Exception as error:  # noqa: BLE001 -- goes into the record
            record.error = f"CLIENT: {error!r}"
        record.end = time.perf_counter() - start
        self._on_record(record)

    def _receive(
        self, record: Record, request: Planned, prompt: str, sampling: dict, start: float
    ) -> None:
        with self._client.stream(
            prompt,
            timeout=self._timeout,
            sampling=sampling,
            business_line=request.business_line or None,
            request_class=request.request_class or None,
        ) as stream:
            latest = 0.0
            for delta in stream:
                now = time.perf_counter() - start
                if delta.text:
                    if record.first:
                        record.gaps.append(round(now - latest, 5))
                    else:
                        record.first = now
                    latest = now
                record.num_output_tokens += delta.num_output_tokens
                record.finish_reason = delta.finish_reason or record.finish_reason
                if delta.usage:
                    record.num_input_tokens = delta.usage.prompt_tokens
                    record.num_cached_tokens = delta.usage.cached_tokens
                    record.device_ms = delta.usage.prefill_ms + delta.usage.decode_ms
                    record.kv_block_seconds = delta.usage.kv_block_seconds
                    record.cost = delta.usage.cost


class _Pulse:
    """Measures how long a thread of this process waits to run, and how busy the process is."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._late: list[float] = []
        self._busy = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> Health:
        self._stopping.set()
        self._thread.join()
        return Health(percentile(self._late, 99) if self._late else 0.0, self._busy)

    def _run(self) -> None:
        since, used = time.perf_counter(), time.process_time()
        while not self._stopping.is_set():
            before = time.perf_counter()
            self._stopping.wait(_BEAT)
            now = time.perf_counter()
            self._late.append(now - before - _BEAT)
            if now - since >= 1:
                total = time.process_time()
                self._busy = max(self._busy, (total - used) / (now - since))
                since, used = now, total
