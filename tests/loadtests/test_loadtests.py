"""The arithmetic of load tests, and the data that passes between them and a peer."""

import json
from types import SimpleNamespace

import pytest

from tests.helpers import make_sequence
from tritium.backend.engine.usage import StepShares
from tritium.loadtests.curve import points
from tritium.loadtests.overhead import Turn, read_turns, turning, verdict
from tritium.loadtests.peers.closed_loop import stepwise
from tritium.loadtests.peers.jobs import PeerError, result_of, write_job
from tritium.loadtests.results import Goal, Ratio, Result, goal_line, load, ratio, save
from tritium.loadtests.statistics import median_interval

# -- results: rounds and ratios --


def result(variant: str, round_: int, speed: float, ttft: float = 0.1) -> Result:
    return Result(
        variant, 8, round=round_, num_tokens=int(speed), seconds=1.0, ttft=[ttft], tpot=[0.01]
    )


GOAL = Goal("ours / theirs", ("uniform", "ours", 8), ("uniform", "theirs", 8), 1.5)


def test_ratio_is_taken_within_each_round():
    results = [result("ours", 0, 200), result("ours", 1, 100), result("ours", 2, 300)]
    results += [result("theirs", 0, 100), result("theirs", 1, 40), result("theirs", 2, 200)]
    assert ratio(results, GOAL) == (2.0, 1.5, 2.5)


def test_round_without_one_of_the_cells_is_left_out():
    results = [result("ours", i, 100 * (i + 1)) for i in range(3)] + [result("theirs", 1, 100)]
    assert ratio(results, GOAL) == (2.0, 2.0, 2.0)


def test_unmeasured_cell_has_no_ratio():
    assert ratio([result("ours", 0, 100)], GOAL) is None


def test_goal_of_a_time_is_an_upper_bound():
    results = [result("ours", 0, 100, ttft=0.2), result("theirs", 0, 100, ttft=0.1)]
    goal = GOAL._replace(measure="TTFT", wanted=1.0)
    reached = ratio(results, goal)
    assert reached == pytest.approx((2.0, 2.0, 2.0))
    assert "MISSED" in goal_line(goal, reached)
    assert "MISSED" not in goal_line(goal, Ratio(0.9, 0.9, 0.9))
    assert "MISSED" in goal_line(GOAL, Ratio(1.4, 1.4, 1.4))


def test_results_are_saved_and_loaded(tmp_path):
    results = [result("ours", 0, 100), result("theirs", 1, 50)]
    save(tmp_path / "results.json", results)
    assert load(tmp_path / "results.json") == results


# -- cost of the bill --


class Recorder:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def add(self, value: int) -> None:
        self.calls.append(value)

    request_finished = count_totals = update = add


def test_turns_with_and_without_the_bill(tmp_path):
    usage, ledger, metrics = (
        SimpleNamespace(Ledger=Recorder, Metrics=Recorder) for _ in ("usage", "ledger", "metrics")
    )
    turning(str(tmp_path / "turns"), usage, ledger, metrics)
    clock = iter(range(0, 10**6, 5))
    busy_time = usage.BusyTime(clock=lambda: next(clock))
    recorders = ledger.Ledger(), metrics.Metrics()
    sequence = make_sequence()
    for step in range(4 * 4 + 1):
        recorders[0].add(step // 4)
        recorders[1].update(step // 4)
        busy_time.end_step(StepShares([7], [sequence], set()))
    turns = read_turns(tmp_path / "turns")
    assert turns == [
        Turn(is_billed, num_sequences=4, work=28, ns=20) for is_billed in (True, False, False, True)
    ]
    for recorder in recorders:
        assert recorder.calls == [0] * 4 + [3] * 4 + [4]


def test_verdict_is_computed_from_pairs():
    def verdict_of(*ratios: float) -> str:
        pairs = [(Turn(True, 9, round(1000 * r), 5), Turn(False, 9, 1000, 5)) for r in ratios]
        return verdict([turn for i, pair in enumerate(pairs) for turn in pair[:: (-1) ** i]])

    assert "3 pairs of turns: 1.000 (95 % interval: 0.990 to 1.020; wanted" in verdict_of(
        1.02, 0.99, 1.0
    )
    assert "MISSED" not in verdict_of(1.02, 0.99, 1.0)
    assert "0.980" in verdict_of(0.98)
    assert "MISSED" in verdict_of(0.98)


def test_median_interval_uses_ranks():
    assert median_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert median_interval(range(1, 11)) == (5.5, 2, 9)  # confidence 1 - 2 * 11 / 1024
    assert median_interval(range(1, 41)) == (20.5, 14, 27)


# -- peers: jobs and answers --


def test_job_file(tmp_path):
    write_job(tmp_path / "job.json", {"model": "m"}, {"uniform": [([1, 2], 3)]})
    job = json.loads((tmp_path / "job.json").read_text())
    assert job == {"settings": {"model": "m"}, "workloads": {"uniform": [[[1, 2], 3]]}}


def test_answer_becomes_a_result():
    answer = json.dumps({"seconds": 2.0, "moments": [[1.0, 1.5, 2.5], [2.0, 2.25, 2.25]]})
    parsed = result_of(answer, "peer", 8, "uniform", [([1], 3), ([1, 2], 1)])
    assert parsed.num_tokens == 4
    assert parsed.tokens_per_second == 2.0
    assert parsed.ttft == [0.5, 0.25]
    assert parsed.tpot == [0.5]


@pytest.mark.parametrize("answer", ["", "{}", "[]", '{"seconds": 1, "moments": []}', "Warning: x"])
def test_malformed_answer_is_an_error(answer):
    with pytest.raises(PeerError, match="peer answered"):
        result_of(answer, "peer", 8, "uniform", [([1], 3)])


def test_closed_loop_keeps_its_concurrency():
    running: dict[int, int] = {}
    most = 0

    def add(i, token_ids, num_tokens):
        running[i] = num_tokens

    def step():
        nonlocal most
        most = max(most, len(running))
        for i in list(running):
            running[i] -= 1
            ended = not running[i]
            if ended:
                del running[i]
            yield i, 1, ended

    requests = [([1], n) for n in (3, 1, 2, 5, 1)]
    moments = stepwise(requests, 2, add, step)
    assert most == 2
    assert all(start <= first <= end for start, first, end in moments)


# -- the curve --


def test_points_are_medians_by_concurrency():
    results = [result("ours", i, speed) for i, speed in enumerate((100, 300, 200))]
    [(variant, [point])] = points(results).items()
    assert (variant, point.concurrency, point.tokens_per_second) == ("ours", 8, 200)
    assert point.tpot_p95_ms == pytest.approx(10)
