"""Steps that fail or run out of memory, and a device on which all steps fail."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import tritonclient.grpc as grpcclient

from tritium.loadtests.faults import BREAKS, FAILS, FAILS_LATE, MODEL_PY, NO_MEMORY
from tritium.loadtests.harness import collect, complete, send, until, write_model

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
ENDLESS = GREEDY | {"max_tokens": 2000}


@pytest.fixture(scope="module")
def control(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def model(server, repository, control, tiny_weights):
    """A model whose steps fail for certain seeds and prompts."""
    write_model(
        repository,
        "failing",
        model=tiny_weights,
        dtype="float32",
        kv_cache_memory="16MiB",
        max_model_len=2048,
        max_num_seqs=16,
        exit_on_crash="false",
    )
    (repository / "failing/1/model.py").write_text(MODEL_PY)
    control.load_model("failing")
    yield "failing"
    control.unload_model("failing")
    until(lambda: not stubs_of(server, "failing") and server.http("health/ready")[0] == 200)


GOOD_PROMPTS = [f"{PROMPT}{' and' * number}" for number in (0, 1, 2, 5, 20, 40, 80)]


@pytest.fixture(scope="module")
def expected(server, model):
    """The answer to each good prompt alone."""
    return [complete(server, prompt, model=model, sampling=GREEDY) for prompt in GOOD_PROMPTS]


@pytest.mark.parametrize(
    ("text", "sampling"),
    [
        (f"{PROMPT} poison", {}),
        ("Fail", {"seed": FAILS}),
        ("Fail later", {"seed": FAILS_LATE}),
        ("Fail three times", {"seed": FAILS, "n": 3}),
    ],
    ids=["token", "prompt", "later", "n"],
)
def test_a_poisoned_request_ends_alone(server, model, expected, text, sampling):
    """Four times in a row in a batch of 8, each time with the right answers to the 7 others."""
    failed_before = server.metric("requests_total", model, outcome="error")
    for _ in range(4):
        with (
            send(server, PROMPT, model=model, stream=True, sampling=ENDLESS) as beside,
            ThreadPoolExecutor(8) as pool,
        ):
            beside.next()  # it runs from the beginning to the end
            answers = [
                pool.submit(complete, server, prompt, model=model, sampling=GREEDY)
                for prompt in GOOD_PROMPTS
            ]
            failing = pool.submit(
                collect, server, text, model=model, stream=True, sampling=ENDLESS | sampling
            )
            response = failing.result()[-1]
            assert [answer.result() for answer in answers] == expected
            assert not beside.next().error
        assert (response.code, response.final) == ("INTERNAL", True)
        assert response.error == "the engine's step failed: injected"
    until(lambda: server.metric("kv_blocks_used", model) == 0)
    assert server.metric("requests_total", model, outcome="error") == failed_before + 4


def test_step_without_memory_is_split_and_no_request_is_lost(server, model):
    prompts = [f"{PROMPT} {'very ' * number}" for number in (0, 20, 40, 80)]
    expected = [complete(server, prompt, model=model, sampling=GREEDY) for prompt in prompts]
    cramped = {"model": model, "sampling": GREEDY | {"seed": NO_MEMORY}}
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda prompt: complete(server, prompt, **cramped), prompts)
        assert list(answers) == expected
    assert "DefaultCPUAllocator: can't allocate memory" in server.log.read_text()


def test_any_number_of_failures_in_a_row_is_survived(server, model, expected):
    for _ in range(20):
        (response,) = collect(server, PROMPT, model=model, sampling={"seed": FAILS})
        assert response.code == "INTERNAL"
    assert complete(server, GOOD_PROMPTS[0], model=model, sampling=GREEDY) == expected[0]


def test_model_whose_device_fails_refuses_requests_until_it_is_reloaded(server, model, control):
    for _ in range(3):
        (response,) = collect(server, PROMPT, model=model, sampling={"seed": BREAKS})
        assert response.code == "INTERNAL"

    def is_refused() -> bool:  # the engine thread ends just after the third error
        (response,) = collect(server, PROMPT, model=model, sampling=GREEDY)
        return response.code == "UNAVAILABLE" and "serves nothing any more" in response.error

    until(is_refused)
    control.load_model(model)
    until(lambda: not is_refused())


def stubs_of(server, model: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.process_id).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process ends at this moment
            if any(f"/{model}/" in word for word in process.cmdline()):
                found.append(process)
    return found
