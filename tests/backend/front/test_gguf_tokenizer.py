"""GGUF tokenizers against llama.cpp's rules."""

import json
import logging

import gguf
import pytest

from tests import llama_cpp_rules
from tests.conftest import SMOLLM2
from tests.texts import random_texts
from tests.tokenizer_shapes import BYTES, byte_level, sentencepiece, split
from tritium.backend.front.gguf_tokenizer import from_metadata, load_gguf
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.gguf_header import read_metadata
from tritium.backend.runner.models.loader import resolve

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = ("<s>", "</s>", "<|im_end|>")


def bpe(pre: str | None, **keys) -> dict:
    """Metadata of byte-level BPE."""
    patterns = llama_cpp_rules.PATTERNS.get(pre, [llama_cpp_rules.GPT2])
    model = json.loads(byte_level(split(*patterns), SPECIAL).to_str())
    texts = [*model["model"]["vocab"], *SPECIAL]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [CONTROL if text in SPECIAL else NORMAL for text in texts],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": texts.index("<s>"),
        "tokenizer.ggml.eos_token_id": texts.index("</s>"),
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def spm(prefix: bool, user_defined: tuple[str, ...] = (), **keys) -> dict:
    """Metadata of SentencePiece's BPE: a piece's score is the negative of its place."""
    fast = sentencepiece(("<unk>", "<s>", "</s>"), prefix, user_defined)
    texts = sorted(fast.get_vocab(), key=fast.token_to_id)
    kinds = dict.fromkeys(user_defined, USER_DEFINED) | dict.fromkeys(BYTES, BYTE)
    kinds |= {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(texts))],
        "tokenizer.ggml.token_type": [kinds.get(text, NORMAL) for text in texts],
    }
    if not prefix:
        metadata["tokenizer.ggml.add_space_prefix"] = False
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


SHAPES = {
    **{pre: lambda pre=pre: bpe(pre) for pre in llama_cpp_rules.PATTERNS},
    "Llama 2": lambda: spm(True),
    "Gemma": lambda: spm(False, ("\n\n", "\n\n\n", "  ", "   ", "<b>")),
}


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_token_ids(make):
    metadata = make()
    fast = from_metadata(metadata).fast
    texts = random_texts(2000, seed=3, special=(*SPECIAL, "<unk>", "<b>"))
    got = [each.ids for each in fast.encode_batch(texts, add_special_tokens=False)]
    different = [
        text
        for text, ids in zip(texts, got, strict=True)
        if ids != llama_cpp_rules.encode(metadata, text)
    ]
    assert different == []


def test_run_of_equal_characters():
    """Pairs of one piece overlap there; SentencePiece takes the leftmost."""
    metadata = spm(True)
    fast = from_metadata(metadata).fast
    for text in (f"x{sign * length}y" for sign in " =-_#" for length in range(1, 200)):
        assert fast.encode(text, add_special_tokens=False).ids == llama_cpp_rules.encode(
            metadata, text
        )


def test_scores_that_say_little(caplog):
    metadata = spm(True)
    scores = metadata["tokenizer.ggml.scores"]
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(scores)
    with pytest.raises(ValueError, match=r"all \d+ pieces have the score -1000.0"):
        from_metadata(metadata)
    assert not caplog.text
    metadata["tokenizer.ggml.scores"] = [max(score, -1000.0) for score in scores]
    from_metadata(metadata)
    assert "pieces of the vocabulary have the score of another one" in caplog.text


def test_piece_of_characters_that_are_none(caplog):
    metadata = spm(True)
    metadata["tokenizer.ggml.tokens"][-1] = "xꙮ"
    from_metadata(metadata)
    assert (
        "1 pieces of the vocabulary have a character that is no piece, such as 'xꙮ'" in caplog.text
    )


# -- the served model --


def test_digits_of_smollm2(tokenizer):
    """As llama.cpp gives them: `smollm` splits digits before words and blanks."""
    assert tokenizer.encode("a:   7") == [81, 42, 333, 39]
    assert [tokenizer.decode_token(i) for i in (81, 42, 333, 39)] == ["a", ":", "   ", "7"]
    assert tokenizer.encode("Hello world 123") == [19556, 905, 216, 33, 34, 35]


def test_smollm2_against_the_rules(tokenizer):
    metadata = read_metadata(resolve(SMOLLM2))
    for text in random_texts(300, seed=4, special=("<|im_start|>", "<file_sep>")):
        assert tokenizer.encode(text) == llama_cpp_rules.encode(metadata, text)


def test_ends_and_roles_of_smollm2(tokenizer):
    assert tokenizer.eos_token_ids == (2, 0, 4)  # <|im_end|>, <|endoftext|>, <reponame>
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.special_token_id("<|im_end|>") == 2
    assert tokenizer.special_token_id("<|im_end|> ") is None
    assert tokenizer.special_token_id("the") is None


# -- BOS and EOS --


@pytest.mark.parametrize(
    ("metadata", "around"),
    [
        (lambda: bpe("llama-bpe"), ("<s>", None)),
        (lambda: bpe("llama-bpe", add_bos_token=False), (None, None)),
        (lambda: bpe("qwen2"), (None, None)),
        (lambda: bpe("qwen2", add_bos_token=True, add_eos_token=True), ("<s>", "</s>")),
        (lambda: spm(True), ("<s>", None)),
        (lambda: spm(True, add_bos_token=False, add_eos_token=True), (None, "</s>")),
        (lambda: spm(True, bos_token_id=2), ("</s>", None)),
    ],
)
def test_tokens_around_a_text(metadata, around):
    fast = from_metadata(metadata()).fast
    bos, eos = ([] if text is None else [fast.token_to_id(text)] for text in around)
    assert fast.encode("a b").ids == bos + fast.encode("a b", add_special_tokens=False).ids + eos


def test_bos_without_an_id_is_refused():
    metadata = bpe("llama-bpe")
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ValueError, match=r"adds BOS and has no tokenizer\.ggml\.bos_token_id"):
        from_metadata(metadata)


# -- which tokens end an answer --


def ends(tokens: list[str], **keys) -> list[str]:
    metadata = bpe("gpt-2", **keys)
    texts = metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"] + tokens
    metadata["tokenizer.ggml.token_type"] += [NORMAL] * len(tokens)
    loaded = from_metadata(metadata)
    assert all(loaded.fast.encode(text).ids == [texts.index(text)] for text in tokens)
    return [texts[i] for i in loaded.eos_token_ids]


def test_ends_by_text():
    assert ends([]) == ["</s>", "<|im_end|>"]
    assert ends(["<|eot_id|>", "<|eom_id|>"]) == ["</s>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>"]
    assert ends(["<end_of_turn>", "<|fim_pad|>", "<|fim_prefix|>"])[-1] == "<|fim_pad|>"


def test_end_that_is_none():
    assert "<|end|>" in ends(["<|end|>"])
    assert "<|end|>" not in ends(["<|end|>", "<|return|>", "<|call|>"])


def test_blanks_after_the_special_tokens_of_phi3():
    metadata = bpe("gpt-2")
    tokens = from_metadata(metadata).fast.encode("</s> a<s> a").tokens
    assert tokens == ["</s>", "Ġa", "<s>", "Ġa"]
    metadata["general.name"] = "Phi-3-mini"
    tokens = from_metadata(metadata).fast.encode("</s> a<s> a").tokens
    assert tokens == ["</s> ", "a", "<s>", "Ġa"]  # the blank belongs to the special token


def test_end_by_key():
    texts = bpe("gpt-2")["tokenizer.ggml.tokens"]
    assert ends([], eot_token_id=texts.index("<s>"))[:2] == ["</s>", "<s>"]


# -- kinds of tokens --


def test_kinds_of_tokens():
    metadata = spm(True, ("<b>",))
    fast = from_metadata(metadata).fast
    ids = fast.encode("x<b></s>", add_special_tokens=False).ids
    assert fast.decode(ids, skip_special_tokens=True) == "x<b>"
    assert fast.decode(ids, skip_special_tokens=False) == "x<b></s>"
    # A byte's token is none in a text.
    assert len(fast.encode("<0x41>", add_special_tokens=False).ids) > 1


# -- files --


def write(path, metadata: dict) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def test_file(tmp_path):
    metadata = bpe("llama-bpe") | {"tokenizer.chat_template": "{{ messages }}{{ bos_token }}"}
    write(tmp_path / "a.gguf", metadata)
    tokenizer = Tokenizer(tmp_path / "a.gguf")
    assert tokenizer.encode("a")[0] == metadata["tokenizer.ggml.bos_token_id"]
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")
    assert tokenizer.encode("<s><s>a") == [tokenizer.encode("a")[0], *tokenizer.encode("a")]
    assert tokenizer.vocab_size == len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer.chat_template == "{{ messages }}{{ bos_token }}"


def test_named_chat_templates():
    templates = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    assert from_metadata(bpe("gpt-2") | templates).chat_template == {
        "default": "a",
        "tool_use": "b",
    }


def test_missing_name_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, "tritium"):
        fast = from_metadata(bpe(None)).fast
    assert "no tokenizer.ggml.pre" in caplog.text
    assert [text for text, _ in fast.pre_tokenizer.pre_tokenize_str("a+1234")] == [
        *("a", "+", "123", "4")
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "model 't5' is not supported. Supported: gpt2, llama"),
        ({"tokenizer.ggml.pre": "smallm"}, "tokenizer.ggml.pre 'smallm' is unknown. Known are a.x"),
        ({"tokenizer.ggml.merges": ["q x"]}, "merges has 'q x', whose parts or whole are no"),
        ({"tokenizer.ggml.merges": None}, "has no 'tokenizer.ggml.merges' in its metadata"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens has 'a' more than once"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "'<=' not supported between"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 elements for 1503 tokens"),
    ],
)
def test_file_that_is_refused(tmp_path, changes, message):
    metadata = {key: value for key, value in (bpe("gpt-2") | changes).items() if value is not None}
    write(tmp_path / "a.gguf", metadata)
    with pytest.raises(ValueError, match=message) as refused:
        load_gguf(tmp_path / "a.gguf")
    assert str(tmp_path / "a.gguf") in str(refused.value)
