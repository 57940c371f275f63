"""What each sequence has used of the device's time: the bill, to the nanosecond.

A step's time D is divided among its sequences in proportion to

    w = a * new tokens + b * attended context + c

and rounded by largest remainder, so that in every step the shares sum to D exactly, in integers.
Time that no sequence causes is charged to system accounts. At all times

    busy = time charged to sequences + time charged to the system accounts
    busy + idle = time since the start

Knows nothing of requests' text, business lines or prices.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from tritium.backend.engine.request import SequenceUsage
from tritium.backend.engine.sequence import ScheduledSequence, Sequence, SequenceStatus


class Weights(NamedTuple):
    """Cost of a sequence's share of a step, in picoseconds; only the ratios matter."""

    token: int  # a: per computed token
    context: int  # b: per token that a computed token attends to, itself included
    sequence: int  # c: per sequence

    def of(self, start: int, end: int, num_sequences: int = 1) -> int:
        """The cost of computing tokens [start, end); token t attends to t + 1 tokens."""
        num_tokens = end - start
        attended = num_tokens * (start + end + 1) // 2
        return self.token * num_tokens + self.context * attended + self.sequence * num_sequences


# SmolLM2-135M in bfloat16 on two cores with AMX; used where the fit at warm-up is poor.
DEFAULT_WEIGHTS = Weights(token=300_000_000, context=300_000, sequence=300_000_000)


class StepShares(NamedTuple):
    """How a step's time will be divided: one weight per payer."""

    weights: list[int]
    payers: list[Sequence]  # a sequence appears twice where it recomputes only a part
    recomputing: set[int]  # indices of shares for computing again what a preemption lost


@dataclass(slots=True)
class DeviceTotals:
    """Where the device's time has gone since the start, in ns. Plain data."""

    busy: int
    idle: int = 0
    open: int = 0  # charged to sequences that have not ended
    warmup: int = 0
    preemption: int = 0  # computing again what a preempted sequence had lost
    fault: int = 0  # steps that failed
    overrun: int = 0  # rows of steps in flight when their sequence ended
    block_ns: int = 0  # time integral of the KV blocks in use
    is_quiet: bool = False  # no sequence is unfinished, so all of block_ns is billed


class BusyTime:
    """Divides the engine's time among sequences and system accounts.

    A step's time runs from the moment the previous step was read until its own tokens are. So it
    includes the host's work between steps, no moment counts twice where steps overlap, and on a
    GPU that never waits it equals what events around the step's kernels would measure.

    Args:
        weights: How a step's time is divided.
        warmup: ns that loading and warm-up took the device.
        clock: Integer ns.
    """

    def __init__(
        self,
        weights: Weights = DEFAULT_WEIGHTS,
        warmup: int = 0,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.weights = weights
        self.clock = clock
        self._totals = DeviceTotals(busy=warmup, warmup=warmup)
        self._closed = 0  # charged to sequences that have ended
        self._total_weight = 0  # sum of all w so far
        self._since = clock()  # time after this is not accounted for yet

    def end_idle(self) -> None:
        """Nothing was to be done since the last step."""
        self._totals.idle += self._lap()

    def end_failed_step(self) -> None:
        duration = self._lap()
        self._totals.busy += duration
        self._totals.fault += duration

    def shares(self, batch: list[ScheduledSequence]) -> StepShares:
        """How the time of a step that is being launched will be divided::

        |<- recomputed ->|<----- new ----->|
        start            num_lost_tokens   end
        """
        token, context, constant = self.weights
        weights: list[int] = []
        payers: list[Sequence] = []
        recomputing: set[int] = set()
        for sequence, start, end, _, _ in batch:
            lost = sequence.num_lost_tokens
            if end - start == 1 and lost <= start:  # the common case
                weights.append(token + context * end + constant)
                payers.append(sequence)
                continue
            new = max(start, min(lost, end))
            if start < new:
                recomputing.add(len(payers))
                weights.append(self.weights.of(start, new, num_sequences=int(new == end)))
                payers.append(sequence)
            if new < end:
                weights.append(self.weights.of(new, end))
                payers.append(sequence)
        return StepShares(weights, payers, recomputing)

    def end_step(self, shares: StepShares) -> int:
        """Divide the time of a step that has just been read, before its tokens are processed.

        Returns:
            The step's time in ns.
        """
        duration = self._lap()
        totals = self._totals
        totals.busy += duration
        self._total_weight += sum(shares.weights)
        parts = split(duration, shares.weights)
        not_billed, recomputing, finished = 0, shares.recomputing, SequenceStatus.FINISHED
        for i, (sequence, part) in enumerate(zip(shares.payers, parts, strict=True)):
            if sequence.status is finished:
                totals.overrun += part
                not_billed += part
            elif i in recomputing:
                sequence.usage.recompute_ns += part
                totals.preemption += part
                not_billed += part
            elif len(sequence.token_ids) > len(sequence.request.prompt_token_ids):
                sequence.usage.decode_ns += part
            else:
                sequence.usage.prefill_ns += part
                if sequence.num_cached_tokens and not sequence.usage.saved_ns:
                    sequence.usage.saved_ns = self._time_of(sequence.num_cached_tokens)
        totals.open += duration - not_billed
        return duration

    def close(self, usages: Iterable[SequenceUsage]) -> None:
        """Note the usage of sequences that have ended."""
        billed = sum(usage.busy_ns for usage in usages)
        self._totals.open -= billed
        self._closed += billed

    def totals(self, block_ns: int, is_quiet: bool) -> DeviceTotals:
        """A copy of the totals, with what the caller knows of blocks and sequences."""
        return replace(self._totals, block_ns=block_ns, is_quiet=is_quiet)

    def check_integrity(self, unfinished: Iterable[Sequence]) -> None:
        """Assert that every nanosecond is on exactly one bill."""
        t = self._totals
        system = t.warmup + t.preemption + t.fault + t.overrun
        assert t.busy == t.open + self._closed + system
        assert t.open == sum(sequence.usage.busy_ns for sequence in unfinished)

    def _time_of(self, num_prompt_tokens: int) -> int:
        """Estimated ns to compute a prompt, at the cost per unit of weight so far."""
        weight = self.weights.of(0, num_prompt_tokens, num_sequences=0)
        t = self._totals
        return weight * (t.busy - t.warmup - t.fault) // self._total_weight

    def _lap(self) -> int:
        now = self.clock()
        duration, self._since = now - self._since, now
        return duration


def split(total: int, weights: Seq[int]) -> list[int]:
    """Parts of `total` in proportion to positive weights, rounded by largest remainder.

    The parts sum to `total`; of equal remainders the earlier one is rounded up.
    """
    whole = sum(weights)
    products = [total * weight for weight in weights]
    parts = [product // whole for product in products]
    missing = total - sum(parts)
    if missing:
        remainders = [product % whole for product in products]
        largest_first = sorted(range(len(parts)), key=remainders.__getitem__, reverse=True)
        for i in largest_first[:missing]:
            parts[i] += 1
    return parts
