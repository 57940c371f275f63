"""Which outputs a response has, and their values: every combination of stream, flags and logprobs.

All requests run concurrently, before the tests check the responses.
"""

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tritium.loadtests.harness import collect, until

PROMPT = "The capital of France is"
NUM_TOKENS = 8
FLAGS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
CASES = [
    pytest.param(stream, returned, logprobs, id=f"{stream=}-{logprobs=}-{'+'.join(returned)}")
    for stream in (False, True)
    for logprobs in (None, 0, 2)
    for count in range(len(FLAGS) + 1)
    for returned in itertools.combinations(FLAGS, count)
]


@pytest.fixture(scope="module")
def answers(server):
    """The responses of every case. A flag that is off is absent or explicitly false."""
    rng = random.Random(0)

    def answer(case):
        stream, returned, logprobs = case
        flags = {
            f"return_{name}": name in returned
            for name in FLAGS
            if name in returned or rng.random() < 0.5
        }
        sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        if logprobs is not None:
            sampling["logprobs"] = logprobs
        return collect(
            server,
            PROMPT,
            stream=stream,
            exclude_input_in_output=True,
            sampling=sampling,
            **flags,
        )

    cases = [param.values for param in CASES]
    with ThreadPoolExecutor(64) as pool:
        return dict(zip(cases, pool.map(answer, cases), strict=True))


@pytest.fixture(autouse=True, scope="module")
def server_stays_usable(server):
    """Checked once per module instead of after each test."""
    yield
    until(lambda: server.metric("kv_blocks_used") == 0)


@pytest.mark.parametrize(("stream", "returned", "logprobs"), CASES)
def test_outputs(answers, stream, returned, logprobs):
    responses = answers[stream, returned, logprobs]
    assert not responses[-1].error, responses[-1]
    assert len(responses) > 1 if stream else len(responses) == 1
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    for response in responses:
        assert set(response.tensors) == {"text_output", *returned}
        assert all(tensor.shape == (1,) for tensor in response.tensors.values())
    assert len({"".join(r.text for r in answer) for answer in answers.values()}) == 1

    def values(name):
        return [response.tensors[name].item() for response in responses]

    if "finish_reason" in returned:
        assert values("finish_reason") == [b"None"] * (len(responses) - 1) + [b"length"]
    if "num_input_tokens" in returned:
        assert set(values("num_input_tokens")) == {5}
    counts = values("num_output_tokens") if "num_output_tokens" in returned else None
    if counts:
        assert sum(counts) == NUM_TOKENS
        assert min(counts) > 0
    sums = values("cumulative_logprob") if "cumulative_logprob" in returned else None
    if sums:
        assert sums == sorted(sums, reverse=True)
        assert sums[-1] < 0
    if "logprobs" in returned:
        per_response = [json.loads(text) for text in values("logprobs")]
        if logprobs is None:
            assert per_response == [None] * len(responses)
        else:
            check_logprobs(per_response, logprobs, counts, sums)


def check_logprobs(per_response, logprobs, counts, sums):
    tokens = list(itertools.chain.from_iterable(per_response))
    assert len(tokens) == NUM_TOKENS
    if counts:
        assert [len(elements) for elements in per_response] == counts
    for token in tokens:
        # The greedy choice is one of the top tokens.
        assert sorted(chosen["rank"] for chosen in token.values()) == list(
            range(1, max(logprobs, 1) + 1)
        )
        assert all(int(token_id) >= 0 for token_id in token)
        assert all(chosen["logprob"] <= 0 for chosen in token.values())
        assert all(isinstance(chosen["decoded_token"], str) for chosen in token.values())
    if sums:
        best = [max(chosen["logprob"] for chosen in token.values()) for token in tokens]
        assert sums[-1] == pytest.approx(sum(best), rel=1e-4)
