"""What each sequence has used of the device's time: the bill, to the nanosecond.

A step's time D is shared among its sequences in proportion to

    w = a * new tokens + b * attended context + c

and rounded by largest remainder, so that at every step the shares sum to D exactly, in integers.
What is nobody's doing goes to accounts of the system. At all times

    busy = what sequences were given + what the system's accounts were given
    busy + idle = the time since the start

Knows nothing of requests' text, business lines or prices.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from tritium.backend.engine.request import Figures
from tritium.backend.engine.sequence import ScheduledSequence, Sequence, SequenceStatus

_GOOD_FIT = 0.8  # of the variance explained


class Weights(NamedTuple):
    """What a sequence's part of a step costs, in picoseconds; only their ratios matter."""

    token: int  # a: a token that is computed
    context: int  # b: a token that one of those attends to, itself included
    sequence: int  # c: taking part in the step

    def of(self, start: int, end: int, num_sequences: int = 1) -> int:
        """Of computing tokens [start, end): token t attends to t + 1 tokens."""
        num_tokens = end - start
        attended = num_tokens * (start + end + 1) // 2
        return self.token * num_tokens + self.context * attended + self.sequence * num_sequences


# SmolLM2-135M in bfloat16 on two cores with AMX: used where the fit at warm-up is poor.
DEFAULT_WEIGHTS = Weights(token=300_000_000, context=300_000, sequence=300_000_000)


class MeasuredStep(NamedTuple):
    """A step of the warm-up, to fit weights to."""

    num_tokens: int
    attended: int  # tokens attended to, summed over the step's tokens
    num_sequences: int
    duration: int  # ns


class Shares(NamedTuple):
    """Who pays for a step, and in what proportion."""

    weights: list[int]
    payers: list[Sequence]  # one a weight
    recomputing: list[int]  # places of those who compute again what a preemption lost


@dataclass(frozen=True, slots=True)
class Totals:
    """Where the device's time has gone since the start, in ns. Plain data."""

    busy: int
    idle: int
    open: int  # given to sequences that have not ended
    warmup: int
    preemption: int  # computing again what a preempted sequence had lost
    fault: int  # steps that failed
    overrun: int  # rows of steps that were under way when their sequence ended
    block_ns: int  # time integral of the KV blocks in use
    is_quiet: bool  # no sequence is there, so that all of block_ns is on bills of ended ones


class BusyTime:
    """Shares the engine's time among sequences and the system's accounts.

    A step's time runs from the moment the step before it was read until its own tokens are: so it
    holds what the host does between steps, no moment counts twice where steps overlap, and on a
    GPU that never waits it is what events around the step's kernels would show.

    Args:
        weights: How a step's time is shared.
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
        self.busy = self.warmup = warmup
        self.idle = self.sequences = self.preemption = self.fault = self.overrun = 0
        self._closed = 0  # of what sequences were given, on bills that have been handed out
        self._shared_weight = 0  # the sum of all w so far
        self.clock = clock
        self._since = clock()  # what comes after is not accounted for yet

    def end_idle(self) -> None:
        """Nothing was to be done since the last step."""
        self.idle += self._lap()

    def end_failed_step(self) -> None:
        duration = self._lap()
        self.busy += duration
        self.fault += duration

    def shares(self, batch: list[ScheduledSequence]) -> Shares:
        """Who is going to pay for a step, as it is being launched::

        |<- recomputed ->|<----- new ----->|
        start            num_lost_tokens   end
        """
        token, context, constant = self.weights
        weights: list[int] = []
        payers: list[Sequence] = []
        recomputing: list[int] = []  # places in payers
        for sequence, start, end, _, _ in batch:
            lost = sequence.num_lost_tokens
            if end - start == 1 and lost <= start:  # most of them
                weights.append(token + context * end + constant)
                payers.append(sequence)
                continue
            new = max(start, min(lost, end))
            if start < new:
                recomputing.append(len(payers))
                weights.append(self.weights.of(start, new, num_sequences=int(new == end)))
                payers.append(sequence)
            if new < end:
                weights.append(self.weights.of(new, end))
                payers.append(sequence)
        return Shares(weights, payers, recomputing)

    def end_step(self, shares: Shares) -> int:
        """Share the time of a step that has just been read, before its tokens are taken in.

        Returns:
            The step's time in ns.
        """
        duration = self._lap()
        self.busy += duration
        self._shared_weight += sum(shares.weights)
        parts = split(duration, shares.weights)
        not_theirs = 0
        for i in shares.recomputing:
            sequence, part = shares.payers[i], parts[i]
            if sequence.status is not SequenceStatus.FINISHED:
                sequence.recompute_ns += part
                self.preemption += part
                not_theirs += part
                parts[i] = 0
        finished = SequenceStatus.FINISHED
        for sequence, part in zip(shares.payers, parts, strict=True):
            if sequence.status is finished:
                self.overrun += part
                not_theirs += part
            elif len(sequence.token_ids) > len(sequence.request.prompt_token_ids):
                sequence.decode_ns += part
            else:
                sequence.prefill_ns += part
                if sequence.num_cached_tokens and not sequence.saved_ns:
                    sequence.saved_ns = self._time_of(sequence.num_cached_tokens)
        self.sequences += duration - not_theirs
        return duration

    def close(self, figures: Iterable[Figures]) -> None:
        """Note the bills that have been handed out."""
        self._closed += sum(f.prefill_ns + f.decode_ns for f in figures)

    def totals(self, block_ns: int, is_quiet: bool) -> Totals:
        return Totals(
            busy=self.busy,
            idle=self.idle,
            open=self.sequences - self._closed,
            warmup=self.warmup,
            preemption=self.preemption,
            fault=self.fault,
            overrun=self.overrun,
            block_ns=block_ns,
            is_quiet=is_quiet,
        )

    def check_integrity(self, unfinished: Iterable[Sequence]) -> None:
        """Assert that every nanosecond is on one bill, and on one only."""
        system = self.warmup + self.preemption + self.fault + self.overrun
        assert self.busy == self.sequences + system
        open_ns = sum(sequence.prefill_ns + sequence.decode_ns for sequence in unfinished)
        assert self.sequences == self._closed + open_ns

    def _time_of(self, num_prompt_tokens: int) -> int:
        """What computing so many tokens takes, at what a unit of weight has cost so far, in ns."""
        weight = self.weights.of(0, num_prompt_tokens, num_sequences=0)
        return weight * (self.busy - self.warmup - self.fault) // self._shared_weight

    def _lap(self) -> int:
        now = self.clock()
        duration, self._since = now - self._since, now
        return duration


def split(total: int, weights: Seq[int]) -> list[int]:
    """Parts of `total` in proportion to positive weights, rounded by largest remainder.

    They sum to `total`; of equal remainders the earlier one is rounded up.
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


def fit(steps: list[MeasuredStep]) -> Weights | None:
    """Least squares of steps' times, with no negative weight; None where the fit is poor.

    The model has a constant as well, for what a step costs whoever is in it; that is shared in
    proportion to the rest.
    """
    if len(steps) <= 4:  # as many unknowns: anything fits
        return None
    columns = np.array([[s.num_tokens, s.attended, s.num_sequences, 1] for s in steps], float)
    durations = np.array([s.duration for s in steps], float)
    variance = ((durations - durations.mean()) ** 2).sum()
    best, least = np.zeros(4), np.inf
    for size in range(1, 5):  # few unknowns: try all sets of those that are not zero
        for kept in combinations(range(4), size):
            found, *_ = np.linalg.lstsq(columns[:, kept], durations, rcond=None)
            error = ((columns[:, kept] @ found - durations) ** 2).sum()
            if (found >= 0).all() and error < least:
                best, least = np.zeros(4), error
                best[list(kept)] = found
    if least > (1 - _GOOD_FIT) * variance or not best[:3].any():
        return None
    token, context, sequence = (round(1000 * weight) for weight in best[:3])
    return Weights(max(token, 1), context, sequence)
