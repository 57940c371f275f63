"""SmolLM2's tokenizer: text to tokens and back, also one token at a time."""

import json

import pytest

from tritium.backend.errors import InvalidArgument

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


# -- chat --


def test_chat_template_of_a_conversation(tokenizer):
    token_ids = tokenizer.encode_chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "你好"},
        ]
    )
    assert token_ids == tokenizer.encode(
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n你好<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_adds_its_system_message(tokenizer):
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == tokenizer.encode(
        f"{BOS}system\n{DEFAULT_SYSTEM}{EOS}\n{BOS}user\nHi{EOS}\n{BOS}assistant\n"
    )


def test_chat_token_is_one_token(tokenizer):
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert token_ids.count(tokenizer.encode(BOS)[0]) == 3
    assert token_ids.count(tokenizer.encode(EOS)[0]) == 2


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": "Hi \ud800"}, {"role": "\ud800", "content": "Hi"}]
)
def test_lone_surrogate_in_a_message_is_refused(tokenizer, message):
    """JSON can contain a lone surrogate, UTF-8 can't."""
    with pytest.raises(InvalidArgument) as refused:
        tokenizer.encode_chat([message])
    assert str(refused.value).startswith("messages: ")
    str(refused.value).encode()


# -- tools --

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_template_that_ignores_tools(tokenizer):
    """SmolLM2's template does."""
    with pytest.raises(InvalidArgument) as refused:
        tokenizer.encode_chat(HI, [TOOL])
    assert str(refused.value) == "tools: this model's chat template does not support them"


def test_template_that_lists_tools(tokenizer, monkeypatch):
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert tokenizer.encode_chat(HI, [TOOL]) == tokenizer.encode(f"{json.dumps(TOOL)}\nHi")
    assert tokenizer.encode_chat(HI) == tokenizer.encode("Hi")


def test_template_that_is_only_for_tools(tokenizer, monkeypatch):
    """Some models have two templates, one of them named tool_use."""
    templates = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    monkeypatch.setattr(tokenizer, "chat_template", templates)
    assert tokenizer.encode_chat(HI, [TOOL]) == tokenizer.encode("1 tools")
    assert tokenizer.encode_chat(HI) == tokenizer.encode("plain")
