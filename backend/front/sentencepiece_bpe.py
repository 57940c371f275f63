"""SentencePiece's BPE, from its pieces and their scores.

SentencePiece joins the two neighbours whose union is the piece of the highest score, the leftmost
of equals, until none is left. The `tokenizers`
library joins by the rank of a pair instead, so each piece's score becomes the rank of all pairs
that it can be made of. Used for tokenizer.model and for GGUF files.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise

import tokenizers
from tokenizers import decoders, models, normalizers

_log = logging.getLogger("tritium")

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def build(model: models.Model, adds_prefix: bool) -> tokenizers.Tokenizer:
    """A tokenizer that treats blanks as SentencePiece does, without added tokens.

    Args:
        model: Of pieces in which blanks are `▁`.
        adds_prefix: Whether a text, and what follows a special token, gets a blank in front.
    """
    fast = tokenizers.Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if adds_prefix else []
    fast.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if adds_prefix else []),
        ]
    )
    return fast


def bpe(
    ids: Mapping[str, int],
    scores: Mapping[str, float],
    byte_fallback: bool = True,
    unknown: str | None = None,
) -> models.BPE:
    """SentencePiece's BPE.

    Args:
        ids: Of all tokens by text, bytes as `<0x0A>`.
        scores: Of those tokens that texts are made of.
        byte_fallback: Whether a character that is no piece becomes its bytes.
        unknown: The token that it becomes otherwise.

    Raises:
        ValueError: a token for a byte is missing, or all pieces have the same score.
    """
    missing = [text for text in _BYTES if text not in ids]
    if byte_fallback and missing:
        raise ValueError(f"the vocabulary has no token {missing[0]} ({len(missing)} bytes missing)")
    merges = _merges(scores)
    _check(scores, merges)
    return models.BPE(
        dict(ids), merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback
    )


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs that make a piece, the best piece first.

    Of the pairs of one piece, those with the longer left half come first: in a run of equal
    characters, where pairs overlap, that is the leftmost one.
    """
    return [
        (text[:cut], text[cut:])
        for text in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in scores and text[cut:] in scores
    ]


def _check(scores: Mapping[str, float], merges: Sequence[tuple[str, str]]) -> None:
    """Ranks can't say all that scores can."""
    formed = list(dict.fromkeys(left + right for left, right in merges))
    equal = [pair for pair in pairwise(formed) if scores[pair[0]] == scores[pair[1]]]
    if equal and len(equal) == len(formed) - 1:
        raise ValueError(
            f"all {len(formed)} pieces have the score {scores[formed[0]]}: the file does not say "
            "how texts are split"
        )
    if equal:
        _log.warning(
            "%d pieces of the vocabulary have the score of another one, such as %r and %r: where "
            "either could be formed, a text may be split otherwise than by SentencePiece",
            *(len(equal), *equal[0]),
        )
    unreachable = [text for text in scores if len(text) > 1 and not set(text) <= scores.keys()]
    if unreachable:
        _log.warning(
            "%d pieces of the vocabulary have a character that is no piece, such as %r: they are "
            "never formed",
            *(len(unreachable), unreachable[0]),
        )
