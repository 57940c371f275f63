"""The bill: shares of time and of KV blocks, with a fake clock that only the runner moves."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import Collector, CountingRunner, make_config, make_request
from tritium.backend.config import SpeculativeConfig
from tritium.backend.engine.engine import Engine, StepInFlight
from tritium.backend.engine.request import SampledToken, SequenceUsage
from tritium.backend.engine.sequence import ScheduledSequence
from tritium.backend.engine.usage import (
    DEFAULT_WEIGHTS,
    BusyTime,
    Weights,
    split,
)
from tritium.loadtests.harness import until

WEIGHTS = Weights(token=1000, context=7, sequence=300)


class Clock:
    """Stands still unless it is moved; calls its watchers before each move."""

    def __init__(self) -> None:
        self.now = 1_000_000
        self.watchers: list[Callable[[int], None]] = []

    def __call__(self) -> int:
        return self.now

    def move(self, duration: int) -> None:
        for watch in self.watchers:
            watch(duration)
        self.now += duration


class TimedRunner(CountingRunner):
    """Launching and reading move the clock by a step's duration; None: the launch fails."""

    def __init__(self, clock: Clock, duration: Callable[[list[ScheduledSequence]], int | None]):
        super().__init__()
        self._clock = clock
        self._duration = duration

    def token_at(self, position: int) -> int:
        return position % 3  # repeats, so that drafts are accepted

    def launch(self, batch):
        read = super().launch(batch)
        duration = self._duration(batch)
        if duration is None:
            self._clock.move(17)
            raise RuntimeError("boom")
        self._clock.move(duration // 3)

        def read_late() -> list[SampledToken]:
            self._clock.move(duration - duration // 3)
            return read()

        return read_late


class Witness:
    """Sums up the blocks that each request holds whenever the clock moves, by brute force."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.block_ns: dict[int, float] = defaultdict(float)
        self.used_block_ns = 0
        self.peaks: Counter[int] = Counter()

    def __call__(self, duration: int) -> None:
        blocks = self._engine.block_manager.blocks
        self.used_block_ns += duration * sum(block.ref_count > 0 for block in blocks)
        for sequence in self._engine.scheduler.unfinished():
            number, table = sequence.request_id, sequence.block_table
            self.block_ns[number] += duration * sum(1 / blocks[i].ref_count for i in table)
            self.peaks[number] = max(self.peaks[number], len(table))

    def check(self, figures: dict[int, SequenceUsage]) -> None:
        for number, f in figures.items():
            expected = self.block_ns[number] / 1e9
            assert f.block_seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert f.peak_blocks == self.peaks[number]
            assert 0 <= f.peak_own_blocks <= f.peak_blocks


class Bench:
    """An engine on a fake clock that also continues after many failures."""

    def __init__(self, duration, overlaps=False, num_blocks=64, weights=WEIGHTS, **changes) -> None:
        self.clock = Clock()
        runner = TimedRunner(self.clock, duration)
        runner.num_blocks, runner.overlaps = num_blocks, overlaps
        self.collector = Collector()
        self.totals = []
        self.busy_time = BusyTime(weights, warmup=5, clock=self.clock)
        config = make_config(**changes)
        self.engine = Engine(
            config, runner, self.collector, self.busy_time, on_totals=self.totals.append
        )
        self.in_flight: StepInFlight | None = None
        self.witness = Witness(self.engine)
        self.clock.watchers.append(self.witness)

    def submit(self, request_id: int = 0, num_forks: int = 0, **fields) -> None:
        """Submit a request and `num_forks` forks of it."""
        requests = [make_request(request_id=request_id, **fields)]
        requests += [
            make_request(request_id=request_id + 1 + i, fork_of=request_id, **fields)
            for i in range(num_forks)
        ]
        if requests[0].max_kv_tokens <= self.engine.max_kv_tokens:
            self.engine.reserve(len(requests))
            self.engine.submit(*requests)

    def step(self) -> None:
        try:
            self.in_flight = self.engine.step(self.in_flight)
        except RuntimeError:  # the third failure in a row, or one after that
            self.in_flight = None
        self.engine.check_integrity()

    def run(self) -> dict[int, SequenceUsage]:
        """Step until all requests have ended; returns their usage by id."""
        while self.engine._inbox or self.engine.scheduler.has_unfinished():
            self.step()
        self.step()  # reads the step in flight
        outputs = [output for output in self.collector.outputs if output.finish_reason]
        figures = {output.request_id: output.usage for output in outputs}
        assert len(figures) == len(outputs)
        return figures


# Many prompts have a common beginning, so that several requests share blocks.
prompts = st.builds(
    lambda num_shared, rest: [0] * 4 * num_shared + rest,
    st.integers(0, 3),
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
)
actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            prompts,
            st.integers(1, 12),
            st.sampled_from([0, 0, 1, 2]),
        ),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("wait"), st.integers(0, 10**9)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    actions=actions,
    durations=st.lists(st.none() | st.integers(0, 10**8), min_size=1, max_size=10),
    overlaps=st.booleans(),
    prefix_cache=st.sampled_from(["on", "off"]),
    num_blocks=st.integers(6, 20),
    drafts=st.booleans(),
)
def test_every_nanosecond_is_on_one_bill(
    actions, durations, overlaps, prefix_cache, num_blocks, drafts
):
    steps = iter(range(10**6))
    bench = Bench(
        lambda batch: durations[next(steps) % len(durations)],
        overlaps,
        num_blocks,
        prefix_cache=prefix_cache,
        speculative_config=SpeculativeConfig() if drafts else None,
    )
    start = bench.clock.now
    num_requests = 0
    for action, *values in actions:
        if action == "submit":
            prompt, max_tokens, num_forks = values
            bench.submit(
                num_requests, num_forks, prompt=prompt, max_tokens=max_tokens, speculative=True
            )
            num_requests += 1 + num_forks
        elif action == "abort":
            bench.engine.abort(values[0])
        elif action == "wait":
            if not bench.engine.scheduler.has_unfinished():
                bench.clock.move(values[0])
        else:
            for _ in range(values[0]):
                bench.step()
    figures = bench.run()

    totals = bench.engine.totals()
    billed = sum(f.prefill_ns + f.decode_ns for f in figures.values())
    system = totals.warmup + totals.preemption + totals.fault + totals.overrun
    assert billed + system == totals.busy
    assert (totals.open, totals.is_quiet) == (0, True)
    assert totals.busy - totals.warmup + totals.idle == bench.clock.now - start
    assert sum(f.recompute_ns for f in figures.values()) == totals.preemption
    assert overlaps or not totals.overrun

    held = sum(f.block_seconds for f in figures.values())
    assert held == pytest.approx(totals.block_ns / 1e9, rel=1e-9, abs=1e-12)
    assert totals.block_ns == bench.witness.used_block_ns
    bench.witness.check(figures)


@given(
    total=st.integers(0, 10**18), weights=st.lists(st.integers(1, 10**18), min_size=1, max_size=50)
)
def test_parts_sum_to_the_total_and_are_off_by_less_than_one(total, weights):
    parts = split(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * whole - total * weight) < whole


def test_largest_remainders_are_rounded_up():
    assert split(10, [1, 1, 1]) == [4, 3, 3]
    assert split(100, [1, 2, 3, 1]) == [14, 29, 43, 14]
    assert split(1, [1, 5]) == [0, 1]


# -- literal bills --


def constant(batch):
    return 1000


def test_a_prompt_and_its_answer():
    bench = Bench(constant)
    bench.submit(prompt=range(10), max_tokens=3)
    (figures,) = bench.run().values()
    assert (figures.prefill_ns, figures.decode_ns, figures.recompute_ns) == (1000, 2000, 0)
    assert bench.engine.totals().busy == 3005  # with the warm-up


def test_a_step_is_shared_by_weight():
    bench = Bench(constant, weights=Weights(token=1, context=0, sequence=0))
    bench.submit(prompt=range(3), max_tokens=1, request_id=0)
    bench.submit(prompt=range(9), max_tokens=1, request_id=1)
    figures = bench.run()
    assert [figures[i].prefill_ns for i in (0, 1)] == [250, 750]


def test_recomputing_after_preemption_is_not_billed():
    """Two sequences of 6 + 7 tokens in blocks of 4: together they need 8 blocks, there are 5."""
    bench = Bench(constant, num_blocks=5, max_num_seqs=2)
    for i in range(2):
        bench.submit(prompt=range(6), max_tokens=8, request_id=i)
    figures = bench.run()
    victim = figures[1]
    assert victim.num_preemptions == 1
    assert victim.recompute_ns > 0
    assert bench.engine.totals().preemption == victim.recompute_ns
    # A decode step of one sequence costs 1,000, one of two costs 500 each; none is charged twice.
    assert victim.decode_ns <= 7000


def test_draft_tokens_are_billed_to_their_sequence():
    def bill(drafts: bool) -> SequenceUsage:
        bench = Bench(
            lambda batch: sum(s.num_new_tokens for s in batch) * 100,
            speculative_config=SpeculativeConfig() if drafts else None,
        )
        bench.submit(prompt=[i % 3 for i in range(12)], max_tokens=12, speculative=True)
        return bench.run()[0]

    assert bill(True).decode_ns >= bill(False).decode_ns
    assert bill(True).recompute_ns == 0  # rejected drafts are computed once, too


def test_a_row_of_an_ended_sequence_is_overrun():
    bench = Bench(constant, overlaps=True)
    bench.submit(prompt=range(4), max_tokens=8, stop_token_ids=frozenset({5 % 3}))
    bench.run()
    # The last two thirds of the third step; the steps of the first two tokens took the rest.
    assert bench.engine.totals().overrun == 667


def test_a_failed_step_is_a_fault():
    durations = iter([1000, None, None])
    bench = Bench(lambda batch: next(durations))
    bench.submit(max_tokens=5)
    (figures,) = bench.run().values()
    assert figures.prefill_ns == 1000
    assert bench.engine.totals().fault == 2 * 17  # it is tried twice


def test_running_a_failed_step_apart_is_billed_like_other_steps():
    def duration(batch):
        return None if any(s.sequence.request_id == 1 for s in batch) else 1000

    bench = Bench(duration)
    for number in range(4):
        bench.submit(number, max_tokens=1)
    figures = bench.run()
    assert [figures[number].prefill_ns for number in range(4)] == [1000, 0, 500, 500]
    # The whole step twice, its first half, and request 1 alone.
    assert bench.engine.totals().fault == 4 * 17


def test_totals_are_reported_after_a_failed_step():
    bench = Bench(lambda batch: None)
    bench.engine.start()
    bench.submit(max_tokens=5)
    bench.collector.wait_until_finished(0)
    until(lambda: bench.totals[-1].fault == 2 * 17)
    assert bench.totals[-1].is_quiet
    bench.engine.stop(0)


def test_time_without_requests_is_idle():
    bench = Bench(constant)
    bench.clock.move(70)
    bench.submit(max_tokens=1)
    bench.run()
    bench.clock.move(30)
    bench.submit(max_tokens=1, request_id=1)
    bench.run()
    totals = bench.engine.totals()
    assert (totals.idle, totals.busy) == (100, 2005)


def test_totals_are_reported_once_per_second_and_at_the_end():
    bench = Bench(lambda batch: 300_000_000)
    bench.submit(max_tokens=10)
    bench.run()
    assert [t.busy // 10**8 for t in bench.totals] == [3, 15, 27, 30, 30]
    assert [t.is_quiet for t in bench.totals] == [False, False, False, True, True]


def test_holders_share_the_cost_of_blocks_and_reuse_is_reported():
    def duration(batch):
        return sum(WEIGHTS.of(s.start, s.end) for s in batch)

    bench = Bench(duration, prefix_cache="on", max_num_batched_tokens=32)
    bench.submit(prompt=range(17), max_tokens=6, request_id=0)
    bench.step()
    bench.submit(prompt=range(17), max_tokens=5, request_id=1)
    figures = bench.run()
    leader, follower = figures[0], figures[1]
    assert (follower.peak_blocks, follower.peak_own_blocks) == (6, 2)
    assert (leader.peak_blocks, leader.peak_own_blocks) == (6, 6)
    # Step 1: the leader has 5 blocks. Steps 2 to 6: both share 4, and have 1 (later 2) each.
    assert leader.block_seconds + follower.block_seconds == pytest.approx(
        bench.engine.totals().block_ns / 1e9
    )
    # 16 tokens of 17 would have taken nearly as long as the leader's prompt.
    assert leader.saved_ns == 0
    assert follower.saved_ns == WEIGHTS.of(0, 16, num_sequences=0)


def test_holders_of_a_block_join_and_leave():
    bench = Bench(constant, prefix_cache="on", max_num_batched_tokens=32)
    for i, max_tokens in enumerate((9, 4, 9, 2)):  # the second one leaves before the first
        bench.submit(prompt=range(17), max_tokens=max_tokens, request_id=i)
        bench.step()
        bench.step()
    bench.witness.check(bench.run())


# -- neutrality --


def busy_of(order: list[str], num_answers: int = 24) -> dict[str, int]:
    """Bills per line; equal requests of these lines arrive in this order, two per step.

    Steps cost what real ones do, including a large part that no sequence causes.
    """

    def duration(batch):
        weight = sum(DEFAULT_WEIGHTS.of(s.start, s.end) for s in batch)
        return 5_000_000 + weight // 1000

    bench = Bench(
        duration,
        num_blocks=400,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        weights=DEFAULT_WEIGHTS,
    )
    for i, _ in enumerate(order):
        bench.submit(prompt=range(40), max_tokens=num_answers, request_id=i)
        if i % 2:
            bench.step()
    bills: Counter[str] = Counter()
    for i, figures in bench.run().items():
        bills[order[i]] += figures.prefill_ns + figures.decode_ns
    return bills


def test_equal_traffic_is_billed_equally():
    bills = busy_of(["red", "blue"] * 30)
    assert bills["red"] == pytest.approx(bills["blue"], rel=0.05)


def test_twice_the_tokens_cost_twice():
    bills = busy_of(["red", "blue", "blue"] * 20)
    assert 1.9 <= bills["blue"] / bills["red"] <= 2.1


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_arrival_does_not_matter(seed):
    order = ["red"] * 30 + ["blue"] * 30
    in_turns = busy_of(["red", "blue"] * 30)
    shuffled = random.Random(seed).sample(order, len(order))
    for other in (busy_of(order), busy_of(order[::-1]), busy_of(shuffled)):
        for line in ("red", "blue"):
            assert other[line] == pytest.approx(in_turns[line], rel=0.05)
