"""A bill: what each business line used and what that costs, computed from ledgers."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from tritium.client.ledger import Ledger

NS_PER_HOUR = 3_600_000_000_000
# Columns to group by, as SQL expressions.
GROUPS = {
    "business_line": "coalesce(nullif(business_line, ''), '(none)')",
    "request_class": "coalesce(nullif(request_class, ''), '(none)')",
    "outcome": "outcome",
    "server": "server",
    "day": "date(arrival, 'unixepoch')",
}
ACCOUNTS = ("warmup", "preemption", "fault", "overrun", "open")  # parts of busy


@dataclass(slots=True)
class Line:
    """What one group of requests used, or one system account."""

    name: tuple[str, ...]  # values of the grouping columns
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    recompute_ns: int = 0  # paid by the system account _preemption
    saved_ns: int = 0
    kv_block_seconds: float = 0.0
    busy_ns: int = 0
    cost: float = 0.0

    def add(self, other: "Line") -> None:
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_SUMMED = [field.name for field in fields(Line)][1:-1]
_SUMS = ", ".join(
    {"requests": "count(*)", "busy_ns": "sum(prefill_ns + decode_ns)"}.get(name, f"sum({name})")
    for name in _SUMMED
)


@dataclass(frozen=True, slots=True)
class Report:
    """A bill.

    With the basis `usage` a line pays for its busy time, and each system account has a line of its
    own. With `allocation` the lines share all time, idle time included, in proportion to their
    busy time. Either way the costs add up to `cost`.
    """

    by: tuple[str, ...]
    basis: str
    lines: list[Line]  # most expensive first, system accounts last
    busy_ns: int
    idle_ns: int
    cost: float

    @classmethod
    def of(cls, ledger: Ledger, by: tuple[str, ...], basis: str, price_per_hour: float) -> "Report":
        groups: dict[tuple[str, ...], Line] = {}
        names = ", ".join(GROUPS[column] for column in by)
        for row in ledger.select(f"{names}, {_SUMS}", "requests", f"GROUP BY {names}"):
            name, sums = tuple(row)[: len(by)], tuple(row)[len(by) :]
            groups.setdefault(name, Line(name)).add(Line(name, *sums))
        accounts = dict.fromkeys((*ACCOUNTS, "busy", "idle"), 0)
        for _, of_server in ledger.by_server():
            for account, ns in _accounts(of_server).items():
                accounts[account] += ns
        busy, idle = accounts["busy"], accounts["idle"]
        system = [
            Line((f"_{account}", *[""] * (len(by) - 1)), busy_ns=accounts[account])
            for account in ACCOUNTS
            if accounts[account]
        ]
        lines = sorted(groups.values(), key=lambda line: (-line.busy_ns, line.name))
        if basis == "allocation":
            billed = sum(line.busy_ns for line in lines)
            whole = busy + idle
            if not billed:  # no line can share it
                system = [Line(("_unused", *[""] * (len(by) - 1)), busy_ns=busy)]
            for line in lines if billed else system:
                share = line.busy_ns / billed if billed else 1.0
                line.cost = whole * share / NS_PER_HOUR * price_per_hour
            lines = lines if billed else [*lines, *system]
        else:
            lines += system
            for line in lines:
                line.cost = line.busy_ns / NS_PER_HOUR * price_per_hour
        return cls(by, basis, lines, busy, idle, sum(line.cost for line in lines))

    def records(self) -> list[dict[str, Any]]:
        """One record per line: the grouping columns, then what the line used."""
        return [
            {**dict(zip(self.by, line.name, strict=True)), **without_name(line)}
            for line in self.lines
        ]


def without_name(line: Line) -> dict[str, Any]:
    return {name: value for name, value in asdict(line).items() if name != "name"}


def _accounts(ledger: Ledger) -> dict[str, int]:
    """Where a server's time went between its first and its last totals."""
    accounts = dict.fromkeys((*ACCOUNTS, "busy", "idle"), 0)
    behind = ""
    if ends := ledger.ends():
        first, last = ends
        # A server's very first totals contain its warm-up, which belongs to this window.
        is_first = first["busy_ns"] == first["warmup_ns"]
        is_first &= ledger.since is None or first["time"] > ledger.since
        for account in accounts:
            column = f"{account}_ns"
            accounts[account] = last[column] - (0 if is_first else first[column])
        behind = f"AND sequence > {last['sequence']}"
    # The device time of rows after the last totals was open at those totals.
    sums = ledger.select("coalesce(sum(prefill_ns + decode_ns), 0)", "requests", behind)
    later: int = sum(ns for (ns,) in sums)
    was_open = min(later, max(accounts["open"], 0))
    accounts["open"] -= was_open
    accounts["busy"] += later - was_open
    return accounts
