"""A tokenizer from SentencePiece's own file, tokenizer.model.

The file is a Protocol Buffers message (sentencepiece_model.proto of
https://github.com/google/sentencepiece). Its few fields are read here: the classes that the
sentencepiece package brings work with one version of protobuf only.
"""

import struct
from collections import defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers

from tritium.backend.files import check_file
from tritium.backend.front import sentencepiece_bpe


class _Kind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_UNIGRAM, _BPE = 1, 2
_NEVER = 100.0  # below the lowest score: pieces that texts are not made of


def load_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a SentencePiece model, without tokens around a text.

    Raises:
        ValueError: the file is no SentencePiece model or needs what is not supported.
    """
    check_file(path)
    data = path.read_bytes()
    try:
        return _build(data)
    except (_NotAModel, TypeError, UnicodeDecodeError, struct.error):
        raise ValueError(
            f"{path} is not a SentencePiece model (Llama 3's original file of this name, for one, "
            "is in tiktoken's format)"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _NotAModel(Exception):
    pass


def _build(data: bytes) -> tokenizers.Tokenizer:
    message = _fields(data)
    pieces = [_fields(piece) for piece in message[1]]
    trainer, normalizer = (_fields(message[i][0]) if message[i] else _fields(b"") for i in (2, 3))
    if not pieces or not all(piece[1] for piece in pieces):
        raise _NotAModel
    kinds = [_last(piece, 3, _Kind.NORMAL) for piece in pieces]
    texts = [_last(piece, 1, b"").decode() for piece in pieces]
    scores = [_float(_last(piece, 2, b"\0\0\0\0")) for piece in pieces]
    model_type = _last(trainer, 3, _UNIGRAM)
    if model_type not in (_UNIGRAM, _BPE):
        raise ValueError(f"model_type {model_type} is not supported. Supported: 1 unigram, 2 BPE")
    if _last(trainer, 24, False) or not _last(normalizer, 5, True) or _Kind.UNUSED in kinds:
        raise ValueError(
            "treat_whitespace_as_suffix, escape_whitespaces false and unused pieces are not "
            "supported"
        )
    adds_prefix = bool(_last(normalizer, 3, True))
    text_rules = _text_rules(normalizer)
    for i, kind in enumerate(kinds):
        if kind == _Kind.USER_DEFINED and "▁" in texts[i]:
            if adds_prefix or text_rules:  # blanks that the text does not have
                raise ValueError(f"user-defined piece {texts[i]!r} with blanks: not supported")
            texts[i] = texts[i].replace("▁", " ")  # it is compared with the text as it stands
    ids = {text: i for i, text in enumerate(texts)}
    normal = {
        text: score
        for text, score, kind in zip(texts, scores, kinds, strict=True)
        if kind == _Kind.NORMAL
    }
    unknown = kinds.index(_Kind.UNKNOWN)
    byte_fallback = bool(_last(trainer, 35, False))
    if model_type == _BPE:
        model: models.Model = sentencepiece_bpe.bpe(ids, normal, byte_fallback, texts[unknown])
    else:
        never = min(scores) - _NEVER
        vocabulary = [(text, normal.get(text, never)) for text in texts]
        model = models.Unigram(vocabulary, unknown, byte_fallback)
    fast = sentencepiece_bpe.build(model, adds_prefix)
    fast.normalizer = normalizers.Sequence([*text_rules, fast.normalizer])
    for text, kind in zip(texts, kinds, strict=True):
        if kind in (_Kind.CONTROL, _Kind.UNKNOWN):
            fast.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == _Kind.USER_DEFINED:
            fast.add_tokens([AddedToken(text, normalized=False)])
    return fast


def _text_rules(normalizer: "_Fields") -> list[normalizers.Normalizer]:
    name = _last(normalizer, 1, b"").decode()
    if name.endswith("_cf"):  # the tokenizers library loses accents with these
        raise ValueError(f"normalization rule {name!r} is not supported")
    rules: list[normalizers.Normalizer] = []
    if charsmap := _last(normalizer, 2, b""):
        rules.append(normalizers.Precompiled(charsmap))
    if _last(normalizer, 4, True):  # remove_extra_whitespaces
        rules.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        rules.append(normalizers.Replace(Regex(" {2,}"), " "))
    return rules


# -- the message --

_Fields = dict[int, list[Any]]  # values by field number: bytes, or int


def _fields(data: bytes) -> _Fields:
    found: _Fields = defaultdict(list)
    at = 0
    try:
        while at < len(data):
            key, at = _varint(data, at)
            kind = key & 7
            value: Any
            if kind == 0:
                value, at = _varint(data, at)
            else:
                size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
                value, at = data[at : at + size], at + size
                if len(value) < size:
                    raise _NotAModel
            found[key >> 3].append(value)
    except (IndexError, KeyError):
        raise _NotAModel from None
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _last(fields: _Fields, number: int, default: Any) -> Any:
    return fields[number][-1] if number in fields else default


def _float(data: bytes) -> float:
    (value,) = struct.unpack("<f", data)
    return float(value)
