"""The limits that `make tune` recommends, and the requests and ratios of `make gains`."""

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tritium.backend.accounts.trace import TraceRequest
from tritium.loadtests.gains import Held, gains_of, requests_of
from tritium.loadtests.replay.plan import Plan
from tritium.loadtests.report.gains import gains_table, load_gains
from tritium.loadtests.report.page import write_page
from tritium.loadtests.report.summary import Distribution, Summary
from tritium.loadtests.results import Result
from tritium.loadtests.traces.format import write_trace
from tritium.loadtests.tune import Point, _undominated, config_lines, fastest, frontier, within


def summary(speed=100.0, ttft=0.2, tpot=0.05, completed=10):
    nothing = Distribution.of([])
    return Summary(
        *("run", 10, completed, 10 - completed, 0, 1.0, 1.0, 1.0, 0.0, speed, 1.0, 1.0, 0.0, 10),
        *(Distribution.of([ttft]), Distribution.of([tpot]), nothing, nothing, nothing),
        *([], [], [], []),
    )


POINTS = [
    Point(256, 16, summary(ttft=0.1, tpot=0.02), summary(100)),
    Point(512, 32, summary(ttft=0.3, tpot=0.04), summary(200)),
    Point(1024, 64, summary(ttft=0.5, tpot=0.09), summary(300)),
    Point(128, 8, summary(ttft=0.01, tpot=0.01, completed=9), summary(400)),
]


def test_highest_token_rate():
    assert fastest(POINTS[:3]) == POINTS[2]


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "best"),
    [(300, 0, 1), (0, 30, 0), (400, 50, 1), (0, 0, 2), (50, 0, None)],
)
def test_fastest_within_bounds_that_answers_all_requests(ttft_ms, tpot_ms, best):
    found = within(POINTS, ttft_ms, tpot_ms)
    assert found == (None if best is None else POINTS[best])


def test_config_lines_can_be_parsed():
    text = f"parameters [\n{config_lines(POINTS[0]).rstrip(',')}\n]"
    parameters = text_format.Parse(text, model_config_pb2.ModelConfig()).parameters
    assert {name: value.string_value for name, value in parameters.items()} == {
        "max_num_batched_tokens": "256",
        "max_num_seqs": "16",
    }


def test_frontier():
    assert _undominated([(3, 9), (1, 5), (2, 4), (4, 8), (2, 6)]) == [(1, 5), (2, 6), (3, 9)]
    assert len(frontier(POINTS, 300, 0).data) == 4


def test_requests_too_long_for_the_model_are_left_out(tmp_path, tokenizer):
    path = tmp_path / "trace"
    lengths = [(40, 8), (90, 20), (30, 4), (10, 2)]
    write_trace(path, (TraceRequest(0, *both) for both in lengths))
    found = requests_of(Plan(path), tokenizer, 2, max_model_len=100)
    assert [(len(r.token_ids), r.num_output_tokens) for r in found] == [(40, 8), (30, 4)]


def result(variant, round_, tokens):
    return Result(variant, 4, "conv", round_, num_tokens=tokens, seconds=1.0)


def test_ratios_to_the_previous_and_the_first_variant():
    held = {name: Held() for name in ("static", "contiguous", "paged")}
    held["paged"].running, held["paged"].kv_tokens = 9, 700
    results = [
        *(result("static", 0, 100), result("contiguous", 0, 150), result("paged", 0, 300)),
        *(result("static", 1, 10), result("contiguous", 1, 13), result("paged", 1, 39)),
        *(result("static", 2, 10), result("contiguous", 2, 14), result("paged", 2, 35)),
    ]
    found = gains_of("conv", results, held)
    assert [variant.tokens_per_second for variant in found.variants] == [10, 14, 39]
    assert [variant.over_before.median for variant in found.variants] == pytest.approx(
        [1, 1.4, 2.5]
    )
    assert [variant.over_first.median for variant in found.variants] == pytest.approx([1, 1.4, 3.5])
    assert (found.variants[2].over_first.low, found.variants[2].over_first.high) == (3, 3.9)
    assert found.variants[2].cells[1:4] == ["9", "700", "39.0"]
    assert gains_table(found).row_count == 3


def test_gains_are_saved_loaded_and_shown_on_the_page(tmp_path):
    held = {"static": Held(), "<paged>": Held()}
    gains = gains_of("conv", [result("static", 0, 10), result("<paged>", 0, 25)], held)
    gains.save(tmp_path / "a/gains.json")
    assert load_gains(tmp_path / "a/gains.json") == gains
    write_page([], tmp_path / "report.html", "conv", gains)
    page = (tmp_path / "report.html").read_text()
    assert "<td>&lt;paged&gt;</td><td>0</td><td>0</td><td>25.0</td>" in page
    assert "2.50 (2.50 to 2.50)" in page
