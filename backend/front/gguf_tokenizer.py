"""A GGUF file's tokenizer, made from its metadata by the rules of llama.cpp.

Facts from src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp. Two kinds of tokenizers:
byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`); others are refused by name.
"""

import logging
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from tritium.backend.front import pre_tokenizers, sentencepiece_bpe
from tritium.backend.front.end_tokens import (
    ENDS_OF_MESSAGE,
    ENDS_OF_TURN,
    OTHER_ENDS,
    end_is_no_end,
)
from tritium.backend.front.loaded_tokenizer import LoadedTokenizer, around
from tritium.backend.gguf_header import read_metadata

_log = logging.getLogger("tritium")


class _Kind(IntEnum):
    """tokenizer.ggml.token_type: what a token is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that are recognized by their text, whatever the file says of them.
_INFILLING = {  # role: texts; one token of each role becomes a control token
    "fim_pre": [
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ],
    "fim_suf": [
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ],
    "fim_mid": [
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ],
    "fim_pad": ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    "fim_rep": ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    "fim_sep": ["<|file_sep|>"],
}
_INFILLING_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"]  # shown, though special

_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}


def load_gguf(path: Path) -> LoadedTokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        ValueError: the file is damaged, or its tokenizer is of an unknown or unsupported kind.
    """
    metadata = read_metadata(path)
    try:
        return from_metadata(metadata)
    except KeyError as error:
        raise ValueError(f"{path}: it has no {error} in its metadata") from error
    except (AttributeError, TypeError, ValueError) as error:  # also values of unexpected types
        raise ValueError(f"{path}: {error}") from error


def from_metadata(metadata: Mapping[str, Any]) -> LoadedTokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Raises:
        KeyError: a key is missing.
        ValueError: the tokenizer is of an unknown or unsupported kind.
    """
    vocabulary = _Vocabulary(metadata)
    model = metadata["tokenizer.ggml.model"]
    if model == "gpt2":
        fast, adds_bos = _byte_level(metadata, vocabulary)
    elif model == "llama":
        fast, adds_bos = _sentencepiece(metadata, vocabulary)
    else:
        raise ValueError(f"tokenizer.ggml.model {model!r} is not supported. Supported: gpt2, llama")

    for is_special in (True, False):
        tokens = vocabulary.added(is_special, str(metadata.get("general.name", "")))
        (fast.add_special_tokens if is_special else fast.add_tokens)(list(tokens))

    bos = eos = None
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        bos = vocabulary.required("bos")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = vocabulary.required("eos")
    if bos or eos:
        fast.post_processor = around(bos, eos)
    return LoadedTokenizer(
        fast, _chat_template(metadata), vocabulary.special_tokens(), vocabulary.ends
    )


class _Vocabulary:
    """The tokens, what they are, and which of them have a role."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        texts: list[str] = metadata["tokenizer.ggml.tokens"]
        self.texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        self.ids = {text: i for i, text in enumerate(self.texts)}
        if len(self.ids) != len(self.texts):
            twice = next(text for i, text in enumerate(self.texts) if self.ids[text] != i)
            raise ValueError(f"tokenizer.ggml.tokens has {twice!r} more than once")
        kinds = metadata.get("tokenizer.ggml.token_type", [_Kind.NORMAL] * len(texts))
        if len(kinds) < len(texts):
            raise ValueError(
                f"tokenizer.ggml.token_type has {len(kinds)} elements for {len(texts)} tokens"
            )
        self.kinds: list[int] = list(kinds)
        is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
        self.roles: dict[str, int] = {"bos": 1, "eos": 2, "unk": 0} if is_sentencepiece else {}
        names = {key: key for key in ("eot", "eom", *_INFILLING)} | _ROLES
        for key, role in names.items():
            token_id = metadata.get(f"tokenizer.ggml.{key}_token_id", self.roles.get(role))
            self.roles.pop(role, None)
            if token_id is not None and 0 <= token_id < len(texts):
                self.roles[role] = token_id
        self._find_by_text()
        self.ends = self._find_ends()

    def _find_by_text(self) -> None:
        by_text = {"eot": ENDS_OF_TURN, "eom": ENDS_OF_MESSAGE, **_INFILLING}
        for role, texts in by_text.items():
            found = [self.ids[text] for text in texts if text in self.ids]
            if found and role not in self.roles:
                self.roles[role] = found[0]
                self.kinds[found[0]] = _Kind.CONTROL

    def _find_ends(self) -> tuple[int, ...]:
        """The ids that end an answer; eos, eot and eom first."""
        roles = [self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles]
        texts = [*ENDS_OF_TURN, *ENDS_OF_MESSAGE, *OTHER_ENDS]
        by_text = [self.ids[text] for text in texts if text in self.ids]
        for token_id in by_text:
            self.kinds[token_id] = _Kind.CONTROL
        infilling = [self.roles[role] for role in _INFILLING_ENDS if role in self.roles]
        found = dict.fromkeys([*roles, *by_text, *infilling])
        end = self.ids.get("<|end|>")
        if end is not None and end_is_no_end(set(self.texts)):
            self.kinds[end] = _Kind.USER_DEFINED
            found.pop(end, None)
        for text in _HARMONY:
            if text in self.ids:
                self.kinds[self.ids[text]] = _Kind.USER_DEFINED
        return tuple(found)

    def added(self, is_special: bool, model_name: str) -> Iterable[AddedToken]:
        """The tokens that are found in a text before it is split.

        Args:
            is_special: Those that are hidden from answers, or the others.
            model_name: general.name; after a Phi-3's special tokens blanks are dropped.
        """
        kinds = (_Kind.CONTROL, _Kind.UNKNOWN) if is_special else (_Kind.USER_DEFINED,)
        is_phi3 = any(name in model_name.lower() for name in ("phi-3", "phi3"))
        keep_blanks = {"<unk>", "<s>", "<|endoftext|>"}
        for text, kind in zip(self.texts, self.kinds, strict=False):
            if kind in kinds:
                rstrip = is_phi3 and text not in keep_blanks
                yield AddedToken(text, special=is_special, normalized=False, rstrip=rstrip)

    def required(self, role: str) -> tuple[str, int]:
        """(text, id) of the token with a role."""
        if role not in self.roles:
            raise ValueError(f"it adds {role.upper()} and has no tokenizer.ggml.{role}_token_id")
        return self.texts[self.roles[role]], self.roles[role]

    def special_tokens(self) -> dict[str, str]:
        """Texts by role, as chat templates name them."""
        return {
            f"{role}_token": self.texts[self.roles[role]]
            for role in _ROLES.values()
            if role in self.roles
        }


def _byte_level(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary
) -> tuple[tokenizers.Tokenizer, bool]:
    """(tokenizer, whether it adds BOS)."""
    name = metadata.get("tokenizer.ggml.pre", "")
    if not name:
        _log.warning(
            "the GGUF file has no tokenizer.ggml.pre: texts are split as llama.cpp does by "
            "default, which may not be how the model was trained. Convert the model again."
        )
    rules = pre_tokenizers.rules(name or "default")
    merges = [_merge(line) for line in metadata["tokenizer.ggml.merges"]]
    for left, right in merges:
        if not {left, right, left + right} <= vocabulary.ids.keys():
            raise ValueError(
                f"tokenizer.ggml.merges has {left + ' ' + right!r}, whose parts or whole are no "
                "tokens"
            )
    fast = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, merges, ignore_merges=rules.ignores_merges)
    )
    fast.pre_tokenizer = pre_tokenizers.byte_level(rules.patterns)
    fast.decoder = decoders.ByteLevel()
    return fast, rules.adds_bos


def _merge(line: str) -> tuple[str, str]:
    cut = line.find(" ", 1)
    return line[:cut], line[cut + 1 :]


def _sentencepiece(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary
) -> tuple[tokenizers.Tokenizer, bool]:
    """(tokenizer, whether it adds BOS)."""
    scores = metadata["tokenizer.ggml.scores"]
    if len(scores) < len(vocabulary.texts):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} elements for {len(vocabulary.texts)} tokens"
        )
    never_formed = {_Kind.CONTROL, _Kind.UNKNOWN, _Kind.USER_DEFINED}
    scored = {
        text: score
        for text, score, kind in zip(vocabulary.texts, scores, vocabulary.kinds, strict=False)
        if kind not in never_formed
    }
    adds_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return sentencepiece_bpe.build(sentencepiece_bpe.bpe(vocabulary.ids, scored), adds_prefix), True


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
    }
    return templates.get("default") if templates.keys() <= {"default"} else templates
