"""SmolLM2's tokenizer: text to tokens and back, also one token at a time."""

import pytest

TEXTS = {
    "English": "The quick brown fox jumps over the lazy dog. It's 12:30!",
    "Chinese": "你好,世界。今天天气怎么样?",
    "Japanese": "日本語のテキスト、カタカナ",
    "Arabic": "مرحبا بالعالم",
    "accents": "Crème brûlée, Übergröße, e\u0301",
    "emoji": "👩🏽‍🚀 👨‍👩‍👧‍👦 🇨🇳 ❤️ 👍🏿",
    "code": "def f(x: int) -> str:\n    return f'{x:>4}'  # ok\n\n\tif x:\n",
    "leading spaces": "   three spaces first",
    "line breaks": "\n\nfirst\r\n\n  second\n",
    "many digits": "3.14159265358979 1,000,000",
}
BOS, EOS = "<|im_start|>", "<|im_end|>"
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def stream(tokenizer, text, prompt="Say:", skip_special_tokens=True) -> list[str]:
    detokenizer = tokenizer.detokenizer(tokenizer.encode(prompt), skip_special_tokens)
    return [detokenizer.add(token_id) for token_id in tokenizer.encode(text)]


# -- encode and decode --


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_comes_back_token_by_token(tokenizer, text):
    pieces = stream(tokenizer, text)
    assert "".join(pieces) == text
    assert len(pieces) == len(tokenizer.encode(text))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_piece_is_complete(tokenizer, text):
    for piece in stream(tokenizer, text):
        assert "\ufffd" not in piece
        piece.encode()


def test_character_of_several_tokens_comes_with_the_last_one(tokenizer):
    assert len(tokenizer.encode("🚀")) == 3
    assert stream(tokenizer, "🚀") == ["", "", "🚀"]


@pytest.mark.parametrize("prompt", ["x", "日本", "👩🏽‍🚀", " ", "\n", EOS, f"{BOS}user\nHi"])
def test_the_answer_does_not_depend_on_the_prompt(tokenizer, prompt):
    assert "".join(stream(tokenizer, " the answer 你好", prompt)) == " the answer 你好"


def test_prompt_that_ends_with_a_replacement_character_is_not_repeated(tokenizer):
    assert "".join(stream(tokenizer, " the answer", prompt="What is \ufffd")) == " the answer"


def test_invalid_bytes_do_not_stop_the_answer(tokenizer):
    half = tokenizer.encode("🚀")[:1]
    detokenizer = tokenizer.detokenizer(tokenizer.encode("x"), True)
    pieces = [detokenizer.add(i) for i in [*half, *half, *tokenizer.encode(" and on")]]
    assert "".join(pieces).endswith(" and on")


def test_no_token_beyond_the_vocabulary(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert max(tokenizer.encode(" ".join(TEXTS.values()))) < 49152


def test_no_token_is_added_around_a_plain_prompt(tokenizer):
    assert tokenizer.encode("") == []
    assert [tokenizer.decode_token(i) for i in tokenizer.encode("Hello world")] == [
        "Hello",
        " world",
    ]


# -- special tokens --


@pytest.mark.parametrize("special", [BOS, EOS, "<|endoftext|>"])
def test_special_token_in_a_text_is_one_token(tokenizer, special):
    assert len(tokenizer.encode(special)) == 1
    assert len(tokenizer.encode(f"a{special}b")) == 3
    assert tokenizer.decode_token(tokenizer.encode(special)[0]) == special


def test_special_tokens_in_an_answer_are_skipped_or_kept(tokenizer):
    text = f" hi{EOS} there"
    assert "".join(stream(tokenizer, text, skip_special_tokens=True)) == " hi there"
    assert "".join(stream(tokenizer, text, skip_special_tokens=False)) == text
