"""Models by their name on the Hub: downloads from a local hub, its cache, and clear refusals.

Each download is a process of its own: huggingface_hub reads the environment once.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.local_hub import COMMIT, Hub, local_hub
from tritium.backend import hub as hub_module

DOWNLOAD = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from tritium.backend import hub
hub._SECONDS = 1
try:
    print(hub.download(sys.argv[1]))
except FileNotFoundError as error:
    print(f"refused: {error}")
"""
NEEDED = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "merges.txt"]
NOT_NEEDED = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.json"]
ELSEWHERE = (
    "Download it where there is a network (`hf download org/name --local-dir FOLDER`), and name "
    "the folder instead"
)


@pytest.fixture
def hub(tmp_path: Path):
    folder = tmp_path / "files"
    for name in NEEDED + NOT_NEEDED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n" * 100_000)
    with local_hub({"org/name": folder, "org/gated": folder}, gated=("org/gated",)) as hub:
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def download(model: str, cache: Path, url: str, **environment: str) -> tuple[str, str]:
    """(the last line of the output, stderr)."""
    settings = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": url, "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", DOWNLOAD, model],
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("model", ["org/name", f"org/name@{COMMIT}"])
def test_what_is_needed_is_downloaded_once(hub: Hub, cache: Path, model: str) -> None:
    folder, log = download(model, cache, hub.url)
    assert folder == str(cache / "models--org--name/snapshots" / COMMIT)
    assert sorted(path.name for path in Path(folder).iterdir()) == sorted(NEEDED)
    assert (Path(folder) / "config.json").read_text() == "config.json\n" * 100_000
    assert f"{model}: downloading 7 MB into {cache}\n" in log

    hub.requests.clear()
    again, log = download(model, cache, hub.url)
    assert again == folder
    assert "downloading" not in log
    assert not [request for request in hub.requests if "/resolve/" in request]


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {}], ids=["offline", "no hub"])
def test_what_is_in_the_cache_needs_no_network(hub: Hub, cache: Path, environment) -> None:
    folder, _ = download("org/name", cache, hub.url)
    hub.requests.clear()
    url = hub.url if environment else "http://127.0.0.1:9"
    assert download("org/name", cache, url, **environment)[0] == folder
    assert hub.requests == []


@pytest.mark.parametrize("hangs", [False, True])
def test_no_network(hub: Hub, cache: Path, hangs: bool) -> None:
    hub.hangs = hangs
    url = hub.url if hangs else "http://127.0.0.1:9"
    started = time.monotonic()
    answer, _ = download("org/name", cache, url)
    assert time.monotonic() - started < 15
    assert answer.startswith(
        f"refused: Model 'org/name' is neither a folder nor in the cache {cache}, and it can't be "
        f"downloaded from {url} ("
    )
    assert answer.endswith(f"). {ELSEWHERE}")


def test_refusals(hub: Hub, cache: Path) -> None:
    start = f"neither a folder nor in the cache {cache}, and "
    for model, environment, expected in [
        (
            "org/none",
            {},
            f"refused: Model 'org/none' is {start}{hub.url} has no such model; if it is private, "
            "set HF_TOKEN to a token that may read it",
        ),
        (
            "org/name@v2",
            {},
            f"refused: Model 'org/name' is {start}it has no revision 'v2' at {hub.url}",
        ),
        (
            "org/gated",
            {},
            f"refused: Model 'org/gated' is {start}it is gated: accept its terms at "
            f"{hub.url}/org/gated and set HF_TOKEN to a token of that account",
        ),
        (
            "org/name",
            {"HF_HUB_OFFLINE": "1"},
            f"refused: Model 'org/name' is {start}HF_HUB_OFFLINE forbids to download it. "
            f"{ELSEWHERE}",
        ),
    ]:
        assert download(model, cache, hub.url, **environment)[0] == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("org/name@main", True),
        ("org/name@refs/pr/1", True),
        ("org", False),
        ("org/name/more", False),
        ("./org/name", False),
        ("../name", False),
        ("/org/name", False),
        ("~/name", False),
        ("org/name.gguf", False),
        ("package:llm/name", False),
        ("a b/c", False),
    ],
)
def test_names(model: str, expected: bool) -> None:
    assert hub_module.is_name(model) is expected
