"""The result of a replay: one record per request, the server's gauges, the client's health."""

from pathlib import Path

import msgspec

from tritium.loadtests.replay.plan import Plan
from tritium.loadtests.traces.describe import Description

TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")  # counters that a report compares


class Record(msgspec.Struct):
    """One request. Times in seconds from the start of the run, by the client's clock."""

    index: int
    due: float
    input_length: int  # planned
    output_length: int
    business_line: str
    request_class: str
    sent: float = 0.0
    first: float = 0.0  # first non-empty text; 0: none
    end: float = 0.0
    num_input_tokens: int = 0  # token counts as reported by the server
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    device_ms: float = 0.0  # device time and cost as billed by the server
    kv_block_seconds: float = 0.0
    cost: float | None = None  # None if the server has no price
    gaps: list[float] = []  # gaps between responses with text
    finish_reason: str = ""
    error: str = ""  # "CODE: message"
    rejected: bool = False  # refused by a limit of the server

    @property
    def outcome(self) -> str:
        """`completed`, `rejected` or `failed`."""
        if not self.error:
            return "completed"
        return "rejected" if self.rejected else "failed"

    @property
    def lag(self) -> float:
        """By how much the request was sent late."""
        return self.sent - self.due

    @property
    def ttft(self) -> float:
        return (self.first or self.end) - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.num_output_tokens - 1)


class Health(msgspec.Struct, frozen=True):
    """The health of one client process during the replay."""

    stall_p99: float  # seconds that a runnable thread waits
    busy: float  # share of one core in the busiest second; Python uses at most one core


class Sample(msgspec.Struct, frozen=True):
    """Metrics of the server at one time."""

    time: float  # seconds from the start
    values: dict[str, float]


class Slo(msgspec.Struct, frozen=True):
    """Bounds of a good request, in seconds; 0: no bound."""

    ttft: float = 0.0
    tpot: float = 0.0

    def is_met(self, record: Record) -> bool:
        return (
            record.outcome == "completed"
            and (not self.ttft or record.ttft <= self.ttft)
            and (not self.tpot or (record.tpot or 0.0) <= self.tpot)
        )


class Run(msgspec.Struct):
    """A replay."""

    name: str
    url: str
    plan: Plan
    source: Description  # the part of the trace that is replayed
    planned: Description  # description of the trace at the plan's scale
    slo: Slo
    max_lag: float  # seconds; a larger p99 lag makes the run invalid
    records: list[Record] = []  # by index
    healths: list[Health] = []  # one per process
    samples: list[Sample] = []
    interrupted: bool = False

    def save(self, folder: Path) -> None:
        """Write `run.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.encode(self, enc_hook=str)
        (folder / "run.json").write_bytes(text)


def load_run(folder: Path) -> Run:
    """Read a saved run."""
    return msgspec.json.decode(
        (folder / "run.json").read_bytes(), type=Run, dec_hook=lambda kind, value: kind(value)
    )
