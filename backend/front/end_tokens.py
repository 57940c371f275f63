"""Tokens that end an answer, known by their text, as llama.cpp knows them."""

ENDS_OF_TURN = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
]
ENDS_OF_MESSAGE = ["<|eom_id|>"]
OTHER_ENDS = [
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "[e~[",
]

# Families of models whose answers go on after <|end|> have one of these sets of tokens.
_GOES_ON_AFTER_END = (
    {"<|return|>", "<|call|>"},
    {"<|flush|>", "<|call|>"},
    {"<|flush|>", "<|calls|>"},
)


def end_is_no_end(texts: set[str]) -> bool:
    """Whether an answer goes on after <|end|> in a vocabulary with these tokens."""
    return any(others <= texts for others in _GOES_ON_AFTER_END)
