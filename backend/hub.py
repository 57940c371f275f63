"""Downloads a model from the Hugging Face Hub into its cache, by its name: org/name@revision.

The environment decides as it does for huggingface_hub: HF_TOKEN, HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE.
"""

import logging
import re
from pathlib import Path
from typing import Any

logger = logging.getLogger("tritium")

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?:@[\w./-]+)?", re.ASCII)
_NEEDED = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "merges.txt"]
_NOT_NEEDED = ["*/*", "consolidated*"]  # in folders: other formats; all weights once more
_SECONDS = 10  # until the hub must have answered


def is_name(model: str) -> bool:
    """Whether a text can be the name of a model on the Hub, such as Qwen/Qwen3-0.6B."""
    return _NAME.fullmatch(model) is not None and not model.endswith(".gguf")


def download(model: str) -> Path:
    """The folder of a model; what is not in the cache yet is downloaded.

    Shows a progress bar on a terminal, and writes to the log how much there is to download.

    Args:
        model: org/name or org/name@revision; a revision is a branch, a tag or a commit.

    Raises:
        FileNotFoundError: the cache does not have it, and it can't be downloaded; says why, and
            what to do.
    """
    # Imported here, as it reads the environment, and most models are files.
    from huggingface_hub import HfApi, constants, snapshot_download

    name, _, revision = model.partition("@")
    which: dict[str, Any] = {
        "repo_id": name,
        "revision": revision or None,
        "allow_patterns": _NEEDED,
        "ignore_patterns": _NOT_NEEDED,
    }
    problem: Exception | None = None
    try:  # `snapshot_download` itself would wait without end
        HfApi().model_info(name, revision=revision or None, timeout=_SECONDS)
    except Exception as error:  # noqa: BLE001 -- whatever it is, the cache may have the model
        problem = error
    try:
        if problem is None:
            files = snapshot_download(**which, dry_run=True)
            if size := sum(file.file_size for file in files if file.will_download):
                cache = constants.HF_HUB_CACHE
                logger.info(f"{model}: downloading {size / 1e6:,.0f} MB into {cache}")
        return Path(snapshot_download(**which, local_files_only=problem is not None))
    except Exception as error:
        raise FileNotFoundError(_explain(model, problem or error)) from error


def _explain(model: str, problem: Exception) -> str:
    from huggingface_hub import constants, errors

    name, _, revision = model.partition("@")
    start = f"Model '{name}' is neither a folder nor in the cache {constants.HF_HUB_CACHE}, and "
    if isinstance(problem, errors.GatedRepoError):
        return (
            f"{start}it is gated: accept its terms at {constants.ENDPOINT}/{name} and set HF_TOKEN "
            "to a token of that account"
        )
    if isinstance(problem, errors.RevisionNotFoundError):
        return f"{start}it has no revision '{revision}' at {constants.ENDPOINT}"
    if isinstance(problem, errors.RepositoryNotFoundError):
        return (
            f"{start}{constants.ENDPOINT} has no such model; if it is private, set HF_TOKEN to a "
            "token that may read it"
        )
    if isinstance(problem, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE forbids to download it"
    else:
        reason = f"it can't be downloaded from {constants.ENDPOINT} ({_first_line(problem)})"
    return (
        f"{start}{reason}. Download it where there is a network (`hf download {name} "
        "--local-dir FOLDER`), and name the folder instead"
    )


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]
