"""Token ids to text: the stream loses nothing, whatever the tokens."""

import random

import pytest
import tokenizers
from tokenizers import decoders, models

from tests.tokenizer_shapes import gpt2, llama2, mistral, qwen2
from tritium.backend.front.detokenizer import Decoder, Detokenizer

BROKEN = "\ufffd"


def fallback(prefix: bool = True) -> tokenizers.Tokenizer:
    """Bytes and a few pieces; ids of bytes are the bytes."""
    pieces = ["<unk>", "▁true", "true", "▁", "a", "你", BROKEN, "▁▁b", "</s>"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {piece: 256 + i for i, piece in enumerate(pieces)}
    fast = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    fast.add_special_tokens(["</s>"])
    return fast


UNK, TRUE_AFTER_BLANK, TRUE, BLANK, A, YOU, SIGN, B, END = range(256, 265)


def stream(fast, token_ids, prompt=(), skip=True) -> list[str]:
    detokenizer = Detokenizer(Decoder(fast), list(prompt), skip)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


# -- whatever the tokens, the whole decoded text comes --


def metaspace() -> tokenizers.Tokenizer:
    fast = mistral().fast
    fast.decoder = decoders.Metaspace()
    return fast


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "make",
    [lambda: gpt2().fast, lambda: qwen2().fast, lambda: llama2().fast, metaspace],
    ids=["byte level", "byte level NFC", "byte fallback", "metaspace"],
)
def test_random_tokens(make, skip):
    fast = make()
    decoder = Decoder(fast)
    rng = random.Random(0)
    # A run of bytes that is broken after a character is seen below.
    usable = [i for i in range(fast.get_vocab_size()) if i not in decoder.bytes]
    for _ in range(1500):
        prompt = rng.choices(usable, k=rng.randrange(12))
        token_ids = rng.choices(usable, k=rng.randrange(60))
        before = fast.decode(prompt, skip_special_tokens=skip)
        whole = fast.decode([*prompt, *token_ids], skip_special_tokens=skip)
        if not whole.startswith(before):
            continue  # the prompt ends within a character: no text does
        detokenizer = Detokenizer(decoder, prompt, skip)
        pieces = [detokenizer.add(token_id) for token_id in token_ids]
        text = before + "".join(pieces) + detokenizer.finish()
        assert text == whole or (text + BROKEN == whole and decoder.end_within_character(token_ids))


def test_random_bytes():
    """Between other tokens; each run is a character, its beginning, or something else."""
    fast = fallback()
    rng = random.Random(1)
    characters = [list(sign.encode()) for sign in "aé€😀\ufffd"]
    for _ in range(3000):
        token_ids: list[int] = []
        for _ in range(rng.randrange(12)):
            character = rng.choice(characters)
            run = rng.choice((character, character[:-1], character[1:], [], [0xFF]))
            token_ids += [*run, rng.choice((TRUE_AFTER_BLANK, TRUE, BLANK, A, YOU, SIGN, B))]
        token_ids += rng.choice(characters)[:-1]
        assert "".join(stream(fast, token_ids)) == fast.decode(token_ids)


# -- bytes that are broken off --


def test_character_of_bytes_comes_with_its_last_byte():
    assert stream(fallback(), [0xF0, 0x9F, 0x9A, 0x80, A]) == ["", "", "", "🚀", "a", ""]
    assert stream(fallback(), [0xE2, 0x82, 0xAC, 0x41]) == ["", "", "€", "A", ""]


def test_bytes_that_another_token_ends():
    assert stream(fallback(), [A, 0xE2, TRUE_AFTER_BLANK]) == ["a", "", BROKEN + " true", ""]
    assert stream(fallback(), [0xE2, 0x82, A]) == ["", "", BROKEN * 2 + "a", ""]


def test_bytes_that_another_byte_ends():
    """What was complete stays; the library would make the whole run broken."""
    assert stream(fallback(), [0xE2, 0x82, 0xAC, 0xFF, A]) == ["", "", "€", BROKEN, "a", ""]
    assert stream(fallback(), [0xE2, 0x41, A]) == ["", BROKEN + "A", "a", ""]
    assert stream(fallback(), [0xE2, 0xE2, 0x82, 0xAC]) == ["", BROKEN, "", "€", ""]
    assert stream(fallback(), [0xFF, 0xFF]) == [BROKEN, BROKEN, ""]


def test_bytes_at_the_end():
    assert stream(fallback(), [A, 0xE2, 0x82]) == ["a", "", "", BROKEN * 2]
    assert stream(fallback(), []) == [""]


def test_byte_level_at_the_end():
    fast = gpt2().fast
    half = fast.encode("🦖").ids[:-1]
    assert len(half) >= 1
    pieces = stream(fast, [*fast.encode("a").ids, *half])
    assert pieces == ["a", *[""] * len(half), ""]  # cut off, mostly by max_tokens
    pieces = stream(fast, [*half, *fast.encode("ab").ids])
    assert "".join(pieces) == BROKEN + "ab"
    lone = fast.encode("🦖").ids[-1:]
    assert "".join(stream(fast, [*fast.encode("a").ids, *lone])) == "a" + BROKEN
    assert "".join(stream(fast, fast.encode("a\ufffd").ids)) == "a" + BROKEN


def test_special_token_within_a_character():
    assert stream(fallback(), [0xE2, 0x82, END, 0xAC, A]) == ["", "", "", "€", "a", ""]
    assert stream(fallback(), [0xE2, END], skip=False) == ["", BROKEN + "</s>", ""]


def test_endless_broken_bytes_are_not_held_back():
    fast = gpt2().fast
    first = fast.encode("🦖").ids[0]
    pieces = stream(fast, [first] * 100)
    assert "".join(pieces) == BROKEN * 99  # the last one is cut off
    assert all(len(piece) == 1 for piece in pieces[1:-1])


def test_replacement_character_as_a_token():
    assert "".join(stream(fallback(), [SIGN] * 20)) == BROKEN * 20
    assert "".join(stream(fallback(), [A, SIGN, TRUE_AFTER_BLANK])) == f"a{BROKEN} true"


# -- after a prompt --


@pytest.mark.parametrize(
    "prompt", [[A], [SIGN], [A, SIGN], list("€".encode()), [TRUE, *[SIGN] * 9]]
)
def test_first_blank_after_a_prompt(prompt):
    assert stream(fallback(), [TRUE_AFTER_BLANK, B], prompt) == [" true", "  b", ""]


def test_first_blank_without_a_prompt():
    assert stream(fallback(), [TRUE_AFTER_BLANK, TRUE_AFTER_BLANK]) == ["true", " true", ""]
    assert stream(fallback(), [TRUE_AFTER_BLANK], [END]) == ["true", ""]
    assert stream(fallback(prefix=False), [TRUE_AFTER_BLANK]) == [" true", ""]


def test_first_blank_after_many_special_tokens():
    assert stream(fallback(), [TRUE_AFTER_BLANK], [A, *[END] * 20]) == [" true", ""]


# -- single tokens --


@pytest.mark.parametrize("prefix", [True, False])
def test_token_keeps_its_leading_blank(prefix):
    decoder = Decoder(fallback(prefix))
    tokens = (TRUE_AFTER_BLANK, TRUE, BLANK, B, END, 0x41)
    assert [decoder.token(token_id) for token_id in tokens] == [
        *(" true", "true", " ", "  b", "</s>", "A")
    ]
    assert Decoder(metaspace()).token(mistral().fast.token_to_id("▁the")) == " the"


def test_bytes_of_a_token_show_with_the_one_that_completes_them():
    """As in vLLM: decoded_token of the others is empty."""
    decoder = Decoder(fallback())
    assert decoder.token(0xE2) == BROKEN
    assert decoder.token_after([], 0xE2) == ""
    assert decoder.token_after([A, 0xE2], 0x82) == ""
    assert decoder.token_after([A, TRUE, 0xE2, 0x82], 0xAC) == "€"
    assert decoder.token_after([A], 0xAC) == ""
    assert decoder.token_after([0xE2, A], 0x82) == ""


def test_bytes_of_a_byte_level_token():
    fast = gpt2().fast
    decoder = Decoder(fast)
    ids = fast.encode("x🦖").ids
    assert [decoder.token(token_id) for token_id in ids] == ["x", *[BROKEN] * (len(ids) - 1)]
    texts = [decoder.token_after(ids[:i], token_id) for i, token_id in enumerate(ids)]
    assert texts[1:] == [*[""] * (len(ids) - 2), "🦖"]
