"""The output thread: in which order responses are sent."""

import queue

import numpy as np
import pytest

from tests.backend.front.test_structured import NoMetrics
from tests.conftest import SMOLLM2
from tritium.backend.accounts.billing import Billing
from tritium.backend.config import EngineConfig
from tritium.backend.engine.request import EngineOutput, SampledToken
from tritium.backend.front.input_processor import Arrival, InputProcessor
from tritium.backend.front.output_thread import LiveRequest, OutputThread
from tritium.backend.front.protocol import parse
from tritium.backend.front.vocabulary import Vocabulary
from tritium.backend.supervisor import Supervisor
from tritium.loadtests.harness import until


class Idle:
    """An engine that does nothing."""

    def abort(self, request_id: int) -> None: ...

    def stats(self) -> None: ...

    def take_steps(self) -> list:
        return []


class Client:
    """Appends its name to `sent` for each response."""

    def __init__(self, name: str, sent: list[str]) -> None:
        self._name = name
        self._sent = sent

    def send(self, tensors, final) -> None:
        self._sent.append(self._name)

    def is_cancelled(self) -> bool:
        return False


@pytest.fixture
def outputs():
    return queue.SimpleQueue()


@pytest.fixture
def thread(outputs, tokenizer):
    thread = OutputThread(
        outputs, Idle(), tokenizer, NoMetrics(), Billing(NoMetrics()), None, lambda: None
    )
    thread.start(Supervisor())
    yield thread
    thread.stop()


def test_first_tokens_are_sent_first_then_interactive_requests(outputs, thread, tokenizer):
    processor = InputProcessor(
        EngineConfig(model=SMOLLM2), tokenizer, 1000, Vocabulary(tokenizer, 49152, ())
    )
    sent: list[str] = []

    def add(name: str, request_class: str) -> int:
        tensors = {
            "text_input": np.array([b"Hi"], dtype=object),
            "stream": np.array([True]),
            "request_class": np.array([request_class.encode()], dtype=object),
        }
        request, arrival = parse(tensors, "{}"), Arrival(0.0, 0)
        [first] = processor.engine_requests(request, [1], None, arrival)
        output = processor.output(request, [1], arrival)
        bill = Billing(NoMetrics()).open(name)
        live = LiveRequest(request, Client(name, sent), {first.request_id: output}, first, bill)
        thread.add(live)
        return first.request_id

    def step(*request_ids: int) -> None:
        token = SampledToken(tokenizer.encode(" house")[0], None)
        outputs.put([EngineOutput(request_id, [token]) for request_id in request_ids])

    offline, interactive = add("offline", "offline"), add("interactive", "interactive")
    step(offline, interactive)
    until(lambda: len(sent) == 2)
    new_offline, new = add("new offline", "offline"), add("new", "interactive")
    step(offline, new_offline, interactive, new)
    until(lambda: len(sent) == 6)
    assert sent[:2] == ["interactive", "offline"]
    assert sent[2:] == ["new", "new offline", "interactive", "offline"]
