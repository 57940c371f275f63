"""The engine over a fake runner: slots, endings, failures, its thread."""

import gc
import pickle
import sys
import threading
import time
from itertools import count

import pytest

from tests.helpers import Collector, CountingRunner, make_config, make_request
from tritium.backend.config import SpeculativeConfig
from tritium.backend.engine.engine import Engine
from tritium.backend.engine.request import (
    Deadline,
    EngineOutput,
    FinishReason,
    Milestone,
    RequestClass,
    SampledToken,
    TokenLogprobs,
)
from tritium.backend.engine.usage import BusyTime
from tritium.backend.errors import InvalidArgument, OutOfMemory, Unavailable
from tritium.loadtests.harness import until

CANCELLED, ERROR, LENGTH, SHUTDOWN = (
    FinishReason.CANCELLED,
    FinishReason.ERROR,
    FinishReason.LENGTH,
    FinishReason.SHUTDOWN,
)
FOREVER = 10_000  # tokens


class FailingRunner(CountingRunner):
    """Fails to launch the steps with these numbers, counted from 1."""

    def __init__(self, *failing_steps: int) -> None:
        super().__init__()
        self.failing_steps = failing_steps
        self.num_steps = 0

    def launch(self, batch):
        self.num_steps += 1
        if self.num_steps in self.failing_steps:
            raise RuntimeError("boom")
        return super().launch(batch)


def make_engine(runner=None, **changes) -> tuple[Engine, Collector]:
    collector = Collector()
    busy_time = BusyTime(clock=count().__next__)  # deterministic sums
    config = make_config(**changes)
    return Engine(config, runner or CountingRunner(), collector, busy_time), collector


def submit(engine, request_id=0, max_tokens=3, prompt=(1, 2, 3), **fields):
    request = make_request(prompt, max_tokens, request_id, **fields)
    engine.reserve(1, request.request_class)
    engine.submit(request)


def step_until_idle(engine, collector, num_requests):
    """Step until so many requests have ended; returns the step in flight."""
    in_flight = None
    while len(collector.reasons) < num_requests:
        in_flight = engine.step(in_flight)
        engine.check_integrity()
    return in_flight


def outputs_of_step(engine, collector) -> list[EngineOutput]:
    num_before = len(collector.outputs)
    engine.step()
    return collector.outputs[num_before:]


def assert_idle(engine):
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert engine.admission_control.num_slots == 0
    engine.admission_control.check_integrity()


# -- what a step costs the host --


def calls_of(engine: Engine) -> int:
    """The number of function calls of a step; unlike seconds, the same on any machine."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # it calls weak references' callbacks
    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_cost_of_a_step_does_not_depend_on_the_number_of_waiting_requests():
    def decoding(num_waiting: int) -> Engine:
        engine, _ = make_engine(max_num_seqs=4, max_queue_size=num_waiting)
        for i in range(4 + num_waiting):
            submit(engine, i, max_tokens=20)
        for _ in range(4):
            engine.step()
        return engine

    assert calls_of(decoding(5000)) == calls_of(decoding(10))


def test_cost_of_a_step_is_linear_in_the_number_of_sequences():
    def calls(num_seqs: int) -> int:
        engine, _ = make_engine(
            CountingRunner(num_blocks=1024), max_num_seqs=num_seqs, max_num_batched_tokens=1024
        )
        for i in range(num_seqs):
            submit(engine, i, max_tokens=20)
        for _ in range(2):
            engine.step()
        return calls_of(engine)

    few, twice, four_times = calls(32), calls(64), calls(128)
    assert (four_times - twice) / (twice - few) == pytest.approx(2, rel=0.05)


# -- slots --


def test_a_full_queue_refuses_and_names_the_limit():
    engine, _ = make_engine(max_num_seqs=2, max_queue_size=1)
    for _ in range(3):
        engine.reserve()
    with pytest.raises(Unavailable) as refused:
        engine.reserve()
    assert str(refused.value) == (
        "queue_full: 3 interactive requests are running or waiting "
        "(max_num_seqs 2 + max_queue_size 1); try again later"
    )
    assert refused.value.code == "UNAVAILABLE"


def test_a_released_slot_can_be_reserved():
    engine, _ = make_engine(max_num_seqs=1, max_queue_size=0)
    engine.reserve()
    engine.release()
    engine.reserve()


@pytest.mark.parametrize("ending", ["length", "abort"])
def test_a_request_that_ends_gives_its_slot_back(ending):
    engine, collector = make_engine(max_num_seqs=1, max_queue_size=0)
    submit(engine)
    with pytest.raises(Unavailable):
        engine.reserve()
    if ending == "abort":
        engine.abort(0)
    step_until_idle(engine, collector, 1)
    engine.reserve()


def test_a_reserved_slot_counts_as_waiting():
    engine, _ = make_engine()
    engine.reserve()
    assert engine.stats().num_waiting == 1


def test_prompt_tokens_count_as_waiting_until_their_request_runs():
    engine, collector = make_engine(max_num_seqs=1, max_queue_tokens=5)
    submit(engine, 0)
    submit(engine, 1)
    with pytest.raises(Unavailable, match="6 prompt tokens") as refused:
        engine.reserve()
    assert refused.value.reason == "queue_tokens"
    engine.step()
    engine.reserve()
    engine.release()
    step_until_idle(engine, collector, 2)
    assert_idle(engine)


def test_a_late_request_leaves_the_queue_before_a_step_is_spent_on_it():
    engine, collector = make_engine(max_num_seqs=1)
    late = Deadline(time.perf_counter() - 1, Milestone.ADMISSION, "too late")
    submit(engine, 0, deadlines=(late,))
    [output] = outputs_of_step(engine, collector)
    assert (output.finish_reason, output.error) == (FinishReason.EXPIRED, "too late")
    assert engine.stats().num_computed_tokens == 0
    assert_idle(engine)


def test_classes_have_separate_slots():
    engine, collector = make_engine(max_num_seqs=1, max_queue_size=0)
    submit(engine, 0, request_class=RequestClass.OFFLINE)
    submit(engine, 1)
    for request_class in RequestClass:
        with pytest.raises(Unavailable, match=request_class.name.lower()):
            engine.reserve(1, request_class)
    step_until_idle(engine, collector, 2)
    assert_idle(engine)


# -- overlapping steps --


class LoggingRunner(CountingRunner):
    """Records when steps are launched and read."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.log: list[str] = []

    def launch(self, batch):
        number = sum(entry.startswith("launch") for entry in self.log)
        self.log.append(f"launch {number}")
        read = super().launch(batch)

        def logged():
            self.log.append(f"read {number}")
            return read()

        return logged


def test_a_step_is_launched_before_the_one_before_it_is_read():
    runner = LoggingRunner(overlaps=True)
    engine, collector = make_engine(runner)
    submit(engine, max_tokens=3)
    step_until_idle(engine, collector, 1)
    assert runner.log == ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]
    assert collector.token_ids(0) == [3, 4, 5]
    assert collector.reasons == {0: [LENGTH]}


def test_without_overlap_each_step_is_read_at_once():
    runner = LoggingRunner()
    engine, collector = make_engine(runner)
    submit(engine, max_tokens=2)
    step_until_idle(engine, collector, 1)
    assert runner.log == ["launch 0", "read 0", "launch 1", "read 1"]


def test_a_request_that_needs_its_history_is_not_overlapped():
    runner = LoggingRunner(overlaps=True)
    engine, collector = make_engine(runner)
    submit(engine, max_tokens=3, presence_penalty=0.5)
    step_until_idle(engine, collector, 1)
    assert runner.log == ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2"]


def test_a_stop_token_that_is_read_late_ends_the_answer_at_its_position():
    engine, collector = make_engine(CountingRunner(overlaps=True))
    submit(engine, max_tokens=8, stop_token_ids=frozenset([4]))
    in_flight = step_until_idle(engine, collector, 1)
    assert collector.token_ids(0) == [3, 4]
    assert collector.reasons == {0: [FinishReason.STOP]}
    assert in_flight
    assert engine.step(in_flight) is None  # reads the step that was launched too early
    assert engine.stats().num_used_blocks == 0


# -- drafts --


class RepeatingRunner(LoggingRunner):
    """Repeats a loop that is broken at each eleventh token, so some drafts are wrong."""

    def token_at(self, position):
        return position if position % 11 == 0 else position % 3


@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_change_only_the_number_of_steps(overlaps):
    def run(**changes):
        runner = RepeatingRunner(num_blocks=24, overlaps=overlaps)
        engine, collector = make_engine(runner, prefix_cache="on", **changes)
        for number in range(6):
            fields = {} if number % 3 else {"stop_token_ids": frozenset([22 + 11 * number])}
            prompt = [runner.token_at(i) for i in range(5 + number)]
            submit(engine, number, 20 + number, prompt, speculative=number != 5, **fields)
        step_until_idle(engine, collector, 6)
        assert_idle(engine)
        answers = [collector.token_ids(number) for number in range(6)]
        return answers, collector.reasons, engine.stats()

    answers, reasons, stats = run()
    drafted_answers, drafted_reasons, drafted_stats = run(speculative_config=SpeculativeConfig())
    assert (drafted_answers, drafted_reasons) == (answers, reasons)
    assert stats.num_draft_tokens == stats.num_accepted_tokens == 0
    assert 20 < drafted_stats.num_accepted_tokens < drafted_stats.num_draft_tokens
    assert drafted_stats.num_steps < stats.num_steps


def test_a_step_that_a_draft_may_follow_is_read_at_once():
    runner = LoggingRunner(overlaps=True)  # no token repeats, so there are no drafts
    engine, collector = make_engine(runner, speculative_config=SpeculativeConfig())
    submit(engine, 0, max_tokens=2)
    step_until_idle(engine, collector, 1)
    assert runner.log == ["launch 0", "launch 1", "read 0", "read 1"]
    runner.log.clear()
    submit(engine, 1, max_tokens=2, speculative=True)
    step_until_idle(engine, collector, 2)
    assert runner.log == ["launch 0", "read 0", "launch 1", "read 1"]


# -- submit --


def test_a_request_that_can_never_fit_is_refused_on_arrival():
    engine, _ = make_engine(CountingRunner(num_blocks=5))  # 20 tokens
    with pytest.raises(InvalidArgument) as refused:
        engine.submit(make_request(range(14), max_tokens=8))
    assert str(refused.value) == (
        "kv_never_fits: the request can never fit in the KV cache: prompt (14 tokens) and "
        "max_tokens (8) together need 21 tokens, the cache holds 20"
    )


def test_a_request_that_just_fits_is_served():
    engine, collector = make_engine(CountingRunner(num_blocks=5))
    submit(engine, prompt=range(14), max_tokens=7)
    step_until_idle(engine, collector, 1)
    assert collector.token_ids(0) == [14, 15, 16, 17, 18, 19, 20]
    assert collector.reasons == {0: [LENGTH]}


def test_outputs_come_step_by_step():
    engine, collector = make_engine()
    submit(engine, max_tokens=2)
    [first] = outputs_of_step(engine, collector)
    assert first.tokens == [SampledToken(3, None)]
    [second] = outputs_of_step(engine, collector)
    assert second.finish_reason == LENGTH
    assert outputs_of_step(engine, collector) == []
    assert collector.token_ids(0) == [3, 4]


def test_an_idle_engine_does_not_run_the_model():
    engine, collector = make_engine(FailingRunner(1))
    assert engine.step() is None
    assert engine.stats().num_steps == 0
    assert collector.outputs == []


def test_stats():
    engine, collector = make_engine(CountingRunner(num_blocks=9), max_num_seqs=2)
    for i in range(3):
        submit(engine, i, max_tokens=2, prompt=range(5))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.num_blocks, stats.num_used_blocks) == (9, 4)
    assert (stats.num_steps, stats.num_computed_tokens) == (1, 10)
    step_until_idle(engine, collector, 3)
    assert_idle(engine)
    assert engine.stats().num_computed_tokens == 18  # 3 x (5 + 1)


# -- abort --


def test_abort_of_a_running_request():
    engine, collector = make_engine()
    submit(engine, 0, max_tokens=50)
    submit(engine, 1)
    engine.step()
    engine.abort(0)
    step_until_idle(engine, collector, 2)
    assert collector.reasons == {0: [CANCELLED], 1: [LENGTH]}
    assert collector.token_ids(0) == [3]
    assert_idle(engine)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_output_is_handed_out_once(overlaps):
    """A list that was handed out does not change later."""
    handed_out: list[list[EngineOutput]] = []
    engine = Engine(make_config(), CountingRunner(overlaps=overlaps), handed_out.append)
    for number in range(3):
        submit(engine, number, max_tokens=8)
    in_flight = engine.step()
    engine.abort(1)
    in_flight = engine.step(in_flight)
    submit(engine, 3, max_tokens=8, bad_words=((1, 2),))  # can't be overlapped
    for _ in range(12):
        in_flight = engine.step(in_flight)
    outputs = [output for handed in handed_out for output in handed]
    for number in (0, 2, 3):
        tokens = [
            t.token_id for output in outputs for t in output.tokens if output.request_id == number
        ]
        assert tokens == list(range(3, 11))


def test_abort_of_a_queued_request():
    engine, collector = make_engine(max_num_seqs=1)
    submit(engine, 0, max_tokens=4)
    submit(engine, 1)
    engine.step()
    engine.abort(1)
    [aborted, _] = outputs_of_step(engine, collector)
    assert (aborted.request_id, aborted.tokens, aborted.finish_reason) == (1, [], CANCELLED)
    step_until_idle(engine, collector, 2)
    assert collector.reasons == {0: [LENGTH], 1: [CANCELLED]}


def test_abort_before_the_first_step():
    engine, collector = make_engine()
    submit(engine)
    engine.abort(0)
    [output] = outputs_of_step(engine, collector)
    assert output.finish_reason == CANCELLED
    assert collector.reasons == {0: [CANCELLED]}
    assert engine.stats().num_steps == 0
    assert_idle(engine)


def test_abort_of_an_ended_or_unknown_request_does_nothing():
    engine, collector = make_engine()
    submit(engine)
    step_until_idle(engine, collector, 1)
    for request_id in (0, 0, 99):
        engine.abort(request_id)
    assert outputs_of_step(engine, collector) == []
    assert collector.reasons == {0: [LENGTH]}
    assert_idle(engine)


# -- the engine's thread --


@pytest.fixture
def start():
    """Makes engines that run on their own thread, and stops them at the end of the test."""
    engines = []

    def start(runner=None, **changes):
        engine, collector = make_engine(runner, **changes)
        engines.append(engine)
        engine.start()
        return engine, collector

    yield start
    for engine in engines:
        engine.stop(0)


def test_the_thread_serves_requests(start):
    engine, collector = start()
    assert engine.is_alive()
    for i in range(5):
        submit(engine, i)
    collector.wait_until_finished(*range(5))
    assert collector.reasons == {i: [LENGTH] for i in range(5)}
    assert collector.token_ids(4) == [3, 4, 5]
    submit(engine, 5)  # after the engine was idle
    collector.wait_until_finished(5)


def test_a_grammar_that_can_t_be_started_refuses_only_its_request():
    class Grammar:
        def start(self):
            raise ValueError("no such grammar")

    engine, collector = make_engine()
    with pytest.raises(ValueError, match="no such grammar"):
        engine.submit(make_request(request_id=0), make_request(request_id=1, grammar=Grammar()))
    submit(engine, 2)
    step_until_idle(engine, collector, 1)
    assert collector.reasons == {2: [LENGTH]}


# -- memory --


class CrampedRunner(CountingRunner):
    """Has memory for steps of at most `max_tokens` tokens."""

    max_tokens = 5

    def launch(self, batch):
        if sum(scheduled.num_new_tokens for scheduled in batch) > self.max_tokens:
            raise OutOfMemory("a lot was asked for")
        return super().launch(batch)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_without_memory_is_repeated_in_smaller_steps(overlaps):
    engine, collector = make_engine(
        CrampedRunner(overlaps=overlaps), max_num_seqs=8, max_num_batched_tokens=32
    )
    for i in range(8):
        submit(engine, i, max_tokens=6, prompt=range(1 + 3 * i))
    step_until_idle(engine, collector, 8)
    for i in range(8):
        assert collector.token_ids(i) == list(range(1 + 3 * i, 7 + 3 * i))
        assert collector.reasons[i] == [LENGTH]
    assert engine.stats().num_preemptions == 0
    assert_idle(engine)


def test_steps_grow_again_when_there_is_memory():
    runner = CrampedRunner(num_blocks=FOREVER)
    engine, collector = make_engine(runner, max_num_batched_tokens=16)
    submit(engine, 0, max_tokens=1000, prompt=range(16))
    engine.step()
    assert engine.scheduler.token_budget == 8
    engine.step()
    assert engine.scheduler.token_budget == 4
    runner.max_tokens = 16
    for num_steps, budget in ((99, 4), (1, 8), (99, 8), (1, 16), (200, 16)):
        for _ in range(num_steps):
            engine.step()
        assert engine.scheduler.token_budget == budget
    assert collector.token_ids(0) == list(range(16, 16 + 397))  # the prompt took 4 steps


def test_a_step_of_one_token_without_memory_fails_its_sequence(start):
    runner = CrampedRunner()
    runner.max_tokens = 0
    engine, collector = start(runner)
    submit(engine, 0)
    collector.wait_until_finished(0)
    assert collector.reasons == {0: [ERROR]}
    assert collector.outputs[0].error == "the engine's step failed: a lot was asked for"
    runner.max_tokens = 16
    submit(engine, 1)
    collector.wait_until_finished(1)
    assert collector.token_ids(1) == [3, 4, 5]


# -- failing steps --


class PoisonedRunner(CountingRunner):
    """Fails in the steps that compute position `at` of some requests."""

    def __init__(self, *poisoned: int, at: int = 0, when: str = "launch", **options) -> None:
        super().__init__(**options)
        self.poisoned, self.at, self.when = set(poisoned), at, when
        self.last: set[int] = set()  # whose tokens the last step has sampled
        self.num_launched = 0

    def launch(self, batch):
        self.num_launched += 1
        for sequence, start, end, _, draft_token_ids in batch:
            known = [*sequence.token_ids[start:end], *draft_token_ids]
            if len(known) < end - start:
                assert sequence.request_id in self.last, "no step has sampled its last token"
        fails = any(
            s.sequence.request_id in self.poisoned and s.start <= max(self.at, s.start) < s.end
            for s in batch
        )
        if fails and self.when == "launch":
            raise RuntimeError("poison" + "." * 1000)
        read = super().launch(batch)
        self.last = {s.sequence.request_id for s in batch if s.samples}

        def fail():
            raise RuntimeError("poison" + "." * 1000)

        return fail if fails else read


def serve(runner, num_requests=8, num_forks=0, prompt=range(5), **changes):
    """Serve requests in the same steps, and check what must hold whichever are poisoned."""
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
    engine, collector = make_engine(runner, **{**limits, **changes})
    for number in range(num_requests):
        requests = [make_request(prompt, 6, number, speculative=True)]
        requests += [
            make_request(prompt, 6, 100 * (1 + fork) + number, fork_of=number, speculative=True)
            for fork in range(num_forks)
        ]
        engine.reserve(len(requests))
        engine.submit(*requests)
    in_flight = step_until_idle(engine, collector, num_requests * (1 + num_forks))
    if in_flight:
        assert engine.step(in_flight) is None
    assert_idle(engine)
    for number, reasons in collector.reasons.items():
        assert reasons == [ERROR if number in runner.poisoned else LENGTH], number
        whole = [runner.token_at(position) for position in range(len(prompt), len(prompt) + 6)]
        num_tokens = max(runner.at - len(prompt) + 1, 0) if number in runner.poisoned else 6
        assert collector.token_ids(number) == whole[:num_tokens], number
    for output in collector.outputs:
        if output.finish_reason is ERROR:
            assert output.error == "the engine's step failed: poison" + "." * 294  # 300 in all
    return engine, collector


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("when", ["launch", "read"])
@pytest.mark.parametrize("at", [0, 4, 5, 7], ids=lambda at: f"token {at}")
@pytest.mark.parametrize(
    "poisoned", [{0}, {3}, {7}, {0, 1}, {2, 5, 6}, set(range(8)), set(range(1, 8))], ids=str
)
def test_a_failing_step_ends_only_the_sequences_that_fail_alone(poisoned, at, when, overlaps):
    runner = PoisonedRunner(*poisoned, at=at, when=when, overlaps=overlaps)
    engine, _ = serve(runner)
    assert engine.totals().fault > 0


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("when", ["launch", "read"])
@pytest.mark.parametrize("at", [3, 11, 12, 14])
@pytest.mark.parametrize("poisoned", [{0}, {1, 100}, {0, 101, 200, 201}], ids=str)
def test_forks_and_chunked_prompts_outlive_a_failing_sequence(poisoned, at, when, overlaps):
    """A leader that fails leaves its forks, which then compute the prompt themselves."""
    runner = PoisonedRunner(*poisoned, at=at, when=when, overlaps=overlaps, num_blocks=40)
    serve(runner, 3, 2, range(12), max_num_seqs=8, max_num_batched_tokens=9, prefix_cache="on")


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("when", ["launch", "read"])
@pytest.mark.parametrize("poisoned", [{0}, {1, 2}], ids=str)
def test_preempted_sequences_outlive_a_failing_one(poisoned, when, overlaps):
    runner = PoisonedRunner(*poisoned, at=8, when=when, overlaps=overlaps, num_blocks=9)
    engine, _ = serve(runner, 6, max_num_batched_tokens=16, reserve_blocks_per_seq=0)
    assert engine.stats().num_preemptions > 0


class PoisonedRepeatingRunner(PoisonedRunner):
    def token_at(self, position):
        return position % 3


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("when", ["launch", "read"])
def test_drafts_outlive_a_failing_sequence(when, overlaps):
    runner = PoisonedRepeatingRunner(1, 3, at=7, when=when, overlaps=overlaps)
    prompt = [position % 3 for position in range(7)]
    engine, _ = serve(runner, 5, 0, prompt, speculative_config=SpeculativeConfig())
    assert engine.stats().num_accepted_tokens > 0


def test_a_step_is_run_apart_in_halves():
    runner = PoisonedRunner(5, when="launch")
    serve(runner)
    # 0..7, once more, 0..3, 4..7, 4..5, 4, 5, 6..7; then five steps of the others
    assert runner.num_launched == 8 + 5


def test_a_step_that_fails_once_costs_no_request():
    engine, collector = make_engine(FailingRunner(1, 3, 4))
    for number in range(3):
        submit(engine, number)
    step_until_idle(engine, collector, 3)
    assert collector.reasons == {number: [LENGTH] for number in range(3)}
    assert collector.token_ids(2) == [3, 4, 5]


def test_blocks_of_a_failed_step_are_not_found():
    runner = PoisonedRunner(0, at=5)
    engine, _ = serve(
        runner, 1, 0, range(12), max_num_seqs=4, max_num_batched_tokens=4, prefix_cache="on"
    )
    assert engine.stats().num_cached_blocks == 1  # of the first step


def test_the_engine_goes_on_after_any_number_of_poisoned_requests(start):
    engine, collector = start(PoisonedRunner(*range(50)), max_num_seqs=3)
    for number in range(50):
        submit(engine, number)
        collector.wait_until_finished(number)
        assert collector.reasons[number] == [ERROR]
    submit(engine, 50)
    collector.wait_until_finished(50)
    assert collector.token_ids(50) == [3, 4, 5]
    assert engine.is_alive()


def test_a_device_that_fails_whatever_it_runs_ends_the_engine(start):
    runner = PoisonedRunner(*range(8), -1)  # -1: the engine's own step
    engine, collector = start(runner, max_num_seqs=2)
    for number in range(8):
        submit(engine, number)
    collector.wait_until_finished(*range(8))
    assert collector.reasons == {i: [ERROR] if i < 3 else [SHUTDOWN] for i in range(8)}
    engine._thread.join(5)
    assert not engine.is_alive()
    with pytest.raises(Unavailable, match=r"serves nothing any more: RuntimeError.*poison"):
        engine.reserve()
    assert_idle(engine)
    engine.check_integrity()


def test_a_fault_in_one_sequence_s_grammar_ends_that_sequence_alone():
    class Grammar:
        is_complete = False

        def start(self):
            return self

        def accept(self, token_id):
            if token_id == 4:
                raise ValueError("no such state")
            return True

    engine, collector = make_engine()
    for number in range(3):
        submit(engine, number, grammar=Grammar() if number == 1 else None)
    step_until_idle(engine, collector, 3)
    assert collector.reasons == {0: [LENGTH], 1: [ERROR], 2: [LENGTH]}
    assert collector.token_ids(1) == [3]
    assert collector.token_ids(2) == [3, 4, 5]
    [error] = [output.error for output in collector.outputs if output.error]
    assert error == "the engine failed on a token: no such state"
    assert_idle(engine)


def test_an_output_that_can_t_be_handed_out_ends_its_sequence_alone():
    class Picky(Collector):
        def __call__(self, outputs):
            if any(output.request_id == 1 for output in outputs):
                raise KeyError("no client")
            super().__call__(outputs)

    collector = Picky()
    engine = Engine(make_config(), CountingRunner(), collector)
    for number in range(3):
        submit(engine, number)
    step_until_idle(engine, collector, 2)
    engine.step()
    assert collector.reasons == {0: [LENGTH], 2: [LENGTH]}
    assert collector.token_ids(2) == [3, 4, 5]
    assert_idle(engine)


def test_bookkeeping_that_fails_three_times_in_a_row_ends_the_engine(start, monkeypatch):
    engine, collector = make_engine()
    submit(engine, 0)
    monkeypatch.setattr(engine.scheduler.drafts, "add_to", lambda *args: 1 / 0)
    engine.start()
    collector.wait_until_finished(0)
    assert collector.reasons == {0: [SHUTDOWN]}
    engine.check_integrity()


# -- endings --


def test_stop_does_not_wait_for_ever_for_a_step_that_hangs(monkeypatch):
    monkeypatch.setattr("tritium.backend.engine.engine._STEP_SECONDS", 0.05)
    gate = threading.Event()

    class Hanging(CountingRunner):
        def launch(self, batch):
            gate.wait()
            return super().launch(batch)

    engine, collector = make_engine(Hanging())
    submit(engine, 0)
    engine.start()
    until(lambda: not engine._inbox)
    engine.stop(0)
    assert collector.reasons == {0: [SHUTDOWN]}
    gate.set()  # the step returns, and changes nothing
    until(lambda: engine.stats().num_steps == 1)
    assert collector.reasons == {0: [SHUTDOWN]}
    assert_idle(engine)


class DyingRunner(CountingRunner):
    def launch(self, batch):
        raise KeyboardInterrupt("dead")


def test_a_loop_that_ends_fails_all_requests_at_once(start):
    engine, collector = start(DyingRunner(), max_num_seqs=1)
    for i in range(3):
        submit(engine, request_id=i)
    collector.wait_until_finished(0, 1, 2)
    assert collector.reasons == {i: [SHUTDOWN] for i in range(3)}
    engine._thread.join(5)
    assert not engine.is_alive()
    with pytest.raises(Unavailable, match="serves nothing any more: KeyboardInterrupt"):
        engine.reserve()
    assert all("serves nothing any more" in output.error for output in collector.outputs)
    assert_idle(engine)


def test_stop_lets_running_and_queued_requests_finish():
    engine, collector = make_engine(CountingRunner(seconds=0.002), max_num_seqs=2)
    engine.start()
    for i in range(6):
        submit(engine, i)
    engine.stop(20)
    assert collector.reasons == {i: [LENGTH] for i in range(6)}
    assert not engine.is_alive()
    assert_idle(engine)


def test_stop_ends_requests_that_do_not_finish_in_time():
    runner = CountingRunner(num_blocks=FOREVER, seconds=0.001)
    engine, collector = make_engine(runner, max_num_seqs=1)
    engine.start()
    for i in range(3):
        submit(engine, i, max_tokens=FOREVER)
    collector.wait_for_a_token(0)
    started = time.monotonic()
    engine.stop(0.05)
    assert time.monotonic() - started < 5
    assert collector.reasons == {i: [SHUTDOWN] for i in range(3)}
    assert_idle(engine)


def test_stop_of_an_engine_that_never_started_ends_its_requests():
    engine, collector = make_engine()
    submit(engine, 0)
    submit(engine, 1)
    engine.abort(1)
    engine.stop(10)
    assert collector.reasons == {0: [SHUTDOWN], 1: [CANCELLED]}


def test_a_stopping_engine_refuses_new_requests():
    engine, _ = make_engine()
    engine.start()
    engine.stop(0)
    with pytest.raises(Unavailable, match="the model is shutting down"):
        engine.reserve()


def test_a_request_that_is_submitted_after_stop_is_answered():
    """It reserved its slot before, and was tokenised meanwhile."""
    engine, collector = make_engine()
    engine.start()
    engine.reserve()
    engine.stop(0)
    try:
        engine.submit(make_request())
    except Unavailable:
        return
    assert collector.reasons == {0: [SHUTDOWN]}


def test_200_threads_submit_and_abort(start):
    """Every second request is aborted after a while; the small KV cache makes some preempted."""
    runner = CountingRunner(num_blocks=12)
    engine, collector = start(runner, max_num_seqs=8, prefix_cache="on", max_queue_size=500)
    barrier = threading.Barrier(200)

    def client(request_id):
        barrier.wait()
        submit(engine, request_id, max_tokens=20, prompt=range(1 + request_id % 9))
        if request_id % 2:
            time.sleep(request_id % 7 * 1e-3)
            engine.abort(request_id)

    clients = [threading.Thread(target=client, args=[i]) for i in range(200)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    collector.wait_until_finished(*range(200))

    assert {i: len(reasons) for i, reasons in collector.reasons.items()} == dict.fromkeys(
        range(200), 1
    )
    for i in range(200):
        first = 1 + i % 9
        token_ids = collector.token_ids(i)
        assert token_ids == list(range(first, first + len(token_ids)))
        if i % 2 == 0:
            assert collector.reasons[i] == [LENGTH]
            assert len(token_ids) == 20
    engine.stop(5)
    assert_idle(engine)
    assert engine.stats().num_preemptions > 0
    engine.scheduler.check_integrity()


def test_requests_and_outputs_are_plain_data():
    tokens = [SampledToken(5, TokenLogprobs(-0.5, 1, [(5, -0.5)]))]
    for data in (make_request(seed=7), EngineOutput(0, tokens, LENGTH)):
        assert pickle.loads(pickle.dumps(data)) == data


class PanickingRunner(PoisonedRunner):
    """Fails as a panic of a Rust library does, which is no `Exception`."""

    def launch(self, batch):
        try:
            return super().launch(batch)
        except RuntimeError as error:
            raise BaseException(str(error)) from None


def test_a_panic_ends_only_the_request_that_causes_it():
    serve(PanickingRunner(3, at=6, num_blocks=256))


class TwiceFailingRunner(CountingRunner):
    """A step of two sequences fails twice; run apart, the longer part first finds no memory."""

    failures, refusals = 2, 1

    def launch(self, batch):
        is_long = any(scheduled.num_new_tokens > 1 for scheduled in batch)
        if self.failures and len(batch) == 2 and is_long:
            self.failures -= 1
            raise RuntimeError("once")
        if not self.failures and self.refusals and len(batch) == 1 and is_long:
            self.refusals -= 1
            raise OutOfMemory("too much")
        return super().launch(batch)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_part_of_a_failed_step_that_finds_no_memory(overlaps):
    """The sequence of one token is ahead of the other one's prompt then."""
    runner, collector = TwiceFailingRunner(overlaps=overlaps), Collector()
    engine = Engine(make_config(), runner, collector)
    for request_id, length in enumerate((24, 1)):
        engine.reserve()
        engine.submit(make_request(range(length), 4, request_id))
    in_flight = None
    while len(collector.reasons) < 2:
        in_flight = engine.step(in_flight)
        if not in_flight:
            engine.check_integrity()
    assert not runner.refusals
    assert collector.token_ids(0) == [24, 25, 26, 27]
    assert collector.token_ids(1) == [1, 2, 3, 4]
