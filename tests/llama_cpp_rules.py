"""llama.cpp's tokenizing in plain Python: slow, and independent of the tokenizers library.

Facts from src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp.
"""

import heapq
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import regex
from tokenizers.pre_tokenizers import ByteLevel

CONTROL, USER_DEFINED = 3, 4
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"],
    "qwen2": [rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}
IGNORES_MERGES = {"llama-bpe"}

_bytes_as_text = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str


def encode(metadata: dict[str, Any], text: str) -> list[int]:
    """The token ids of a text, without BOS and EOS."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (2, 3, 4)]
    found: list[int] = []
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    for part, is_special in _partition(text, special):
        if is_special:
            found.append(ids[part])
        elif is_sentencepiece:
            prefix = "▁" if metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
            text = prefix + part.replace(" ", "▁")
            found += _sentencepiece(text, ids, metadata["tokenizer.ggml.scores"])
        else:
            name = metadata["tokenizer.ggml.pre"]
            ranks = _ranks(metadata["tokenizer.ggml.merges"])
            for piece in _split(part, PATTERNS[name]):
                word = "".join(text for text, _ in _bytes_as_text(piece))
                if name in IGNORES_MERGES and word in ids:
                    found.append(ids[word])
                else:
                    found += [ids[token] for token in _merge(word, ranks)]
    return found


def _partition(text: str, special: list[str]) -> Iterator[tuple[str, bool]]:
    """(part, whether it is a special token): longer tokens first, each from the left."""
    parts = [(text, False)]
    for token in sorted(special, key=lambda token: -len(token.encode())):
        split: list[tuple[str, bool]] = []
        for part, is_special in parts:
            if is_special:
                split.append((part, True))
                continue
            first, *others = part.split(token)
            split.append((first, False))
            for other in others:
                split += [(token, True), (other, False)]
        parts = split
    return ((part, is_special) for part, is_special in parts if part)


def _split(text: str, patterns: list[str]) -> list[str]:
    """The pieces: matches, and what lies between them."""
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


_RANKS: dict[int, dict[tuple[str, str], int]] = {}


def _ranks(merges: list[str]) -> dict[tuple[str, str], int]:
    if id(merges) not in _RANKS:
        pairs = (tuple(line.split(" ")) for line in merges)
        _RANKS[id(merges)] = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
    return _RANKS[id(merges)]


def _merge(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-level BPE: the pair of the lowest rank is joined, the leftmost of equals."""
    symbols = list(word)
    while len(symbols) > 1:
        best, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(symbols)))
        if best == len(ranks):
            break
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return symbols


def _sentencepiece(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE: the pair whose union has the highest score is joined."""
    symbols: list[str | None] = list(text)
    after, before = list(range(1, len(text) + 1)), list(range(-1, len(text) - 1))
    queue: list[tuple[float, int, int, str]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right < len(text):
            union = f"{symbols[left]}{symbols[right]}"
            if union in ids:
                heapq.heappush(queue, (-scores[ids[union]], left, right, union))

    for i in range(len(text) - 1):
        consider(i, i + 1)
    while queue:
        _, left, right, union = heapq.heappop(queue)
        if symbols[left] is None or symbols[right] is None:
            continue
        if f"{symbols[left]}{symbols[right]}" != union:
            continue
        symbols[left], symbols[right] = union, None
        after[left] = after[right]
        if after[right] < len(text):
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    found = []
    for symbol in symbols:
        if symbol in ids:
            found.append(ids[symbol])
        elif symbol is not None:
            found += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found
