"""A tokenizer from a Hugging Face folder.

tokenizer.json is what the tokenizer does: normalizer, pre-tokenizer, post-processor and tokens
come from there, whatever class other files name. tokenizer_config.json and its companions add what
tokenizer.json does not say: the roles of tokens, tokens that were added later, whether BOS and EOS
stand around a text, the chat template. Facts of transformers are those of its version 4.57.
"""

from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from tritium.backend.files import read_json, read_text
from tritium.backend.front.end_tokens import ENDS_OF_MESSAGE, ENDS_OF_TURN, end_is_no_end
from tritium.backend.front.loaded_tokenizer import LoadedTokenizer, around
from tritium.backend.front.sentencepiece_model import load_sentencepiece

_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SENTENCEPIECE = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model.v3",
)


class _Family(NamedTuple):
    """A class of transformers that heeds add_bos_token and add_eos_token, with its defaults."""

    model_types: str  # that use it when no class is named
    bos: str
    eos: str
    adds_bos: bool


_LLAMA = _Family(
    "arcee aria chameleon deepseek_v2 deepseek_v3 diffllama ernie4_5 ernie4_5_moe jamba jetmoe "
    "llama llama4 llama4_text ministral mistral mistral3 mixtral mllama persimmon phi3 phimoe "
    "zamba zamba2",
    "<s>",
    "</s>",
    True,
)
_FAMILIES = {
    "Llama": _LLAMA,
    "CodeLlama": _LLAMA._replace(model_types="code_llama"),
    "Gemma": _Family(
        "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2",
        "<bos>",
        "<eos>",
        True,
    ),
    "Cohere": _Family("cohere cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", True),
    "GPTNeoX": _Family(
        "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmo2 olmoe rwkv stablelm xlstm",
        "<|endoftext|>",
        "<|endoftext|>",
        False,
    ),
}


def load_folder(folder: Path) -> LoadedTokenizer:
    """The tokenizer of a folder.

    Raises:
        ValueError: a file is missing, broken or not supported; names the file.
    """
    config = _read_json(folder / "tokenizer_config.json")
    try:
        return _load(folder, config)
    except (AttributeError, KeyError, TypeError) as error:  # values of unexpected types
        path = folder / "tokenizer_config.json"
        raise ValueError(f"{path} or a file beside it has an unexpected value: {error!r}") from None


def _load(folder: Path, config: dict[str, Any]) -> LoadedTokenizer:
    family = _family(folder, config)
    chat_template = _chat_template(folder, config)
    names = _role_names(folder, config)
    if (folder / "tokenizer.json").is_file():
        fast = _read_tokenizer(folder / "tokenizer.json")
    elif model := next(_existing(folder, _SENTENCEPIECE), None):
        fast = _from_sentencepiece(model, config, family)
        family = family or _LLAMA
        config.setdefault("add_bos_token", family.adds_bos)
    else:
        return _by_transformers(folder)
    fast.no_truncation()
    fast.no_padding()
    _add_tokens(folder, fast, config, names)
    if family:
        for role, text in (("bos_token", family.bos), ("eos_token", family.eos)):
            if role not in config and fast.token_to_id(text) is not None:
                names.setdefault(role, text)
    if family and not config.keys().isdisjoint({"add_bos_token", "add_eos_token"}):
        adds_bos = config.get("add_bos_token", family.adds_bos)
        adds_eos = config.get("add_eos_token", False)
        fast.post_processor = around(
            _token(folder, fast, names, "bos_token") if adds_bos else None,
            _token(folder, fast, names, "eos_token") if adds_eos else None,
        )
    return LoadedTokenizer(fast, chat_template, names, _ends(fast, names, chat_template))


def _family(folder: Path, config: dict[str, Any]) -> _Family | None:
    model = _read_json(folder / "config.json")
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if isinstance(named, str):
        return _FAMILIES.get(named.removesuffix("Fast").removesuffix("Tokenizer"))
    model_type = model.get("model_type", "")
    families = _FAMILIES.values()
    return next((each for each in families if model_type in each.model_types.split()), None)


# -- files --


def _existing(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    return (folder / name for name in names if (folder / name).is_file())


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no such file."""
    return read_json(path) if path.exists() else {}


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 -- the library raises bare exceptions
        read_json(path)  # says it better if the file is no JSON at all
        raise ValueError(
            f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}; perhaps it "
            "was written by a newer version"
        ) from None


def _from_sentencepiece(
    path: Path, config: dict[str, Any], family: _Family | None
) -> tokenizers.Tokenizer:
    named = config.get("tokenizer_class", "")
    try:
        if family is None and named not in ("", "PreTrainedTokenizerFast", "TokenizersBackend"):
            raise ValueError(f"{path} belongs to a {named}, which is not supported")
        return load_sentencepiece(path)
    except ValueError as error:
        raise ValueError(f"{error}. {_how_to_make(path.parent)}") from error


def _how_to_make(folder: Path) -> str:
    return (
        f"{folder / 'tokenizer.json'} is needed. Take it from the model's page, or make it where "
        'sentencepiece and tiktoken are installed: python -c "from transformers import '
        f"AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )


def _by_transformers(folder: Path) -> LoadedTokenizer:
    """The tokenizer of a folder with vocab.json and merges.txt; there are many such formats."""
    if not (folder / "vocab.json").is_file() or not (folder / "merges.txt").is_file():
        others = [path.name for path in sorted(folder.iterdir()) if _is_foreign(path.name)]
        found = f" (it has {', '.join(others)}, which is not supported)" if others else ""
        raise ValueError(f"{folder} has no tokenizer.json{found}. {_how_to_make(folder)}")
    from transformers import AutoTokenizer  # takes seconds

    try:
        hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        fast = hf.backend_tokenizer
    except Exception as error:  # noqa: BLE001 -- it may raise anything
        raise ValueError(
            f"{folder} has no tokenizer.json, and its vocab.json and merges.txt cannot be read: "
            f"{str(error)[:300]}. {_how_to_make(folder)}"
        ) from None
    fast.no_truncation()
    fast.no_padding()
    template = _chat_template(folder, _read_json(folder / "tokenizer_config.json"))
    names = {role: str(text) for role, text in hf.special_tokens_map.items() if role in _ROLES}
    return LoadedTokenizer(fast, template, names, _ends(fast, names, template))


def _is_foreign(name: str) -> bool:
    return name in ("tekken.json", "vocab.txt") or name.endswith((".tiktoken", ".model"))


# -- tokens --


def _text(value: Any) -> str | None:
    """The text of a token, given by itself or with its properties."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _role_names(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Texts by role. special_tokens_map.json counts for folders without added_tokens_decoder."""
    values = config
    if "added_tokens_decoder" not in config:
        values = config | _read_json(folder / "special_tokens_map.json")
    return {role: text for role in _ROLES if (text := _text(values.get(role))) is not None}


def _add_tokens(
    folder: Path, fast: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str]
) -> None:
    """Adds the tokens that the other files know and tokenizer.json lacks."""
    special = set(names.values()) | set(_other_special(folder, config))
    known = {token.content for token in fast.get_added_tokens_decoder().values()}
    for token_id, value in _declared_tokens(folder, config):
        text = value["content"]
        if text in known:
            continue
        is_special = bool(value.get("special", False)) or text in special
        properties = {
            name: bool(value.get(name, default))
            for name, default in (
                ("lstrip", False),
                ("rstrip", False),
                ("single_word", False),
                ("normalized", not is_special),
            )
        }
        token = AddedToken(text, special=is_special, **properties)
        (fast.add_special_tokens if is_special else fast.add_tokens)([token])
        known.add(text)
        if fast.token_to_id(text) != token_id:
            raise ValueError(
                f"{folder}: the token {text!r} has the id {token_id} in added_tokens_decoder or "
                f"added_tokens.json, but tokenizer.json, which lacks it, would make it "
                f"{fast.token_to_id(text)}"
            )
    for text in dict.fromkeys([*names.values(), *sorted(special)]):
        if text not in known:
            fast.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _declared_tokens(folder: Path, config: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """(id, properties) of each token, in the order of ids."""
    declared = config.get("added_tokens_decoder")
    if declared is None:
        of_file = _read_json(folder / "added_tokens.json")
        declared = {token_id: {"content": text} for text, token_id in of_file.items()}
    try:
        tokens = [(int(token_id), value) for token_id, value in declared.items()]
    except (AttributeError, ValueError):
        tokens = [(0, None)]
    if any(not isinstance(value, dict) or _text(value) is None for _, value in tokens):
        raise ValueError(f"{folder}: added_tokens_decoder must be an object of tokens by their ids")
    return sorted(tokens, key=itemgetter(0))


def _other_special(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    values = config
    if "added_tokens_decoder" not in config:
        values = config | _read_json(folder / "special_tokens_map.json")
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = values.get(key) or []
        for each in value.values() if isinstance(value, dict) else value:
            if (text := _text(each)) is not None:
                yield text


def _token(
    folder: Path, fast: tokenizers.Tokenizer, names: dict[str, str], role: str
) -> tuple[str, int]:
    text = names.get(role)
    token_id = fast.token_to_id(text) if text is not None else None
    if text is None or token_id is None:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: add_{role} is true, and {role} is missing"
        )
    return text, token_id


def _ends(
    fast: tokenizers.Tokenizer,
    names: dict[str, str],
    chat_template: str | dict[str, str] | None,
) -> tuple[int, ...]:
    """EOS, and what the chat template ends turns with."""
    templates = chat_template.values() if isinstance(chat_template, dict) else [chat_template or ""]
    added = {token.content: i for i, token in fast.get_added_tokens_decoder().items()}
    texts = [
        text
        for text in (*ENDS_OF_TURN, *ENDS_OF_MESSAGE)
        if text in added
        and any(text in template for template in templates)
        and not (text == "<|end|>" and end_is_no_end(set(added)))
    ]
    eos = fast.token_to_id(names["eos_token"]) if "eos_token" in names else None
    return tuple(dict.fromkeys([*([] if eos is None else [eos]), *(added[text] for text in texts)]))


# -- the chat template --


def _chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Of files of their own, or else of tokenizer_config.json."""
    value = config.get("chat_template") or _read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates |= {each["name"]: each["template"] for each in value}
    elif isinstance(value, dict):
        templates |= value
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    for name, path in files.items():
        if path.is_file():
            templates[name] = read_text(path)
    return templates.get("default") if templates.keys() <= {"default"} else templates
