"""SentencePiece's BPE, from its pieces and their scores.

SentencePiece joins the two neighbours whose union is the piece of the highest score, the leftmost
of equals, until none is left. The `tokenizers`
library joins by the rank of a pair instead, so each piece's score becomes the rank of all pairs
that it can be made of. Used for tokenizer.model and for GGUF files.
"""

from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, normalizers

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def build(
    ids: Mapping[str, int],
    scores: Mapping[str, float],
    adds_prefix: bool,
    byte_fallback: bool = True,
    unknown: str | None = None,
) -> tokenizers.Tokenizer:
    """A tokenizer without added tokens and post-processor.

    Args:
        ids: Of all tokens by text, bytes as `<0x0A>`, blanks as `▁`.
        scores: Of those tokens that texts are made of.
        adds_prefix: Whether a text, and what follows a special token, gets a blank in front.
        byte_fallback: Whether a character that is no piece becomes its bytes.
        unknown: The token that it becomes otherwise.

    Raises:
        ValueError: a token for a byte is missing.
    """
    missing = [text for text in _BYTES if text not in ids]
    if byte_fallback and missing:
        raise ValueError(f"the vocabulary has no token {missing[0]} ({len(missing)} bytes missing)")
    model = models.BPE(
        dict(ids),
        _merges(scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
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
