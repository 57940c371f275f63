"""What a tokenizer's files say, whatever their format."""

from typing import NamedTuple

import tokenizers
from tokenizers.processors import PostProcessor, TemplateProcessing


class LoadedTokenizer(NamedTuple):
    """A tokenizer as read from its files."""

    fast: tokenizers.Tokenizer
    chat_template: str | dict[str, str] | None  # or templates by name
    special_tokens: dict[str, str]  # text by role, such as bos_token, as chat templates name them
    eos_token_ids: tuple[int, ...]  # end an answer


def around(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> PostProcessor:
    """A post-processor that puts special tokens around a text.

    Args:
        bos, eos: (text, id), or None for no such token.
    """
    # The template's own names for the tokens: a text with a blank or colon would be taken apart.
    named = {name: token for name, token in (("bos", bos), ("eos", eos)) if token}
    single = f"{'bos:0 ' if bos else ''}$A:0{' eos:0' if eos else ''}"
    pair = f"{single}{' bos:1' if bos else ''} $B:1{' eos:1' if eos else ''}"
    tokens = [
        {"id": name, "ids": [token_id], "tokens": [text]}
        for name, (text, token_id) in named.items()
    ]
    return TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
