"""What of a Hugging Face folder acts: tokenizer.json, and what other files add to it."""

import io
import json
import sys

import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken

from tests.texts import random_texts
from tests.tokenizer_shapes import corpus, deepseek, gpt2, llama2, llama3, phi3, qwen2, save
from tritium.backend.front.chat import Chat
from tritium.backend.front.chat_template import render
from tritium.backend.front.tokenizer import Tokenizer
from tritium.backend.front.tokenizer_folder import load_folder

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path):
    save(llama3(), tmp_path)
    return tmp_path


def edit(path, **changes):
    """Sets keys of a JSON file; None takes them away."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def configure(folder, **changes):
    edit(folder / "tokenizer_config.json", **changes)


# -- settings of tokenizer.json that belong to training --


def test_baked_truncation_and_padding_do_not_act(folder):
    text = "a b " * 200
    wanted = Tokenizer(folder).encode(text)
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.enable_truncation(max_length=16)
    fast.enable_padding(length=4000)
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert len(wanted) > 200
    assert tokenizer.encode(text) == wanted
    restored = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    assert restored.encode_batch([text, "a"])[0].ids == wanted


# -- BOS --


def test_bos_in_the_text_is_not_doubled(folder):
    tokenizer = Tokenizer(folder)
    bos = tokenizer.special_token_id("<|begin_of_text|>")
    plain = tokenizer.encode("Hello")
    assert plain[0] == bos
    assert tokenizer.encode("<|begin_of_text|>Hello") == plain
    assert tokenizer.encode("<|begin_of_text|>") == [bos] == tokenizer.encode("")
    assert tokenizer.encode("<|begin_of_text|><|begin_of_text|>Hello") == [bos, *plain]
    assert tokenizer.encode(" <|begin_of_text|>").count(bos) == 2


def test_two_tokens_in_front(folder):
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("<|eot_id|>", "<|start_header_id|>")
    ids = [fast.token_to_id(name) for name in names]
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|eot_id|> <|start_header_id|> $A",
        special_tokens=list(zip(names, ids, strict=True)),
    )
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a")[:2] == ids
    assert tokenizer.encode("<|eot_id|><|start_header_id|>a") == tokenizer.encode("a")
    assert tokenizer.encode("<|eot_id|>a")[:3] == [*ids, ids[0]]


@pytest.mark.parametrize(
    ("make", "config", "bos", "eos"),
    [
        # Classes that heed the settings, as transformers 4.57 does.
        (deepseek, {}, "<｜begin▁of▁sentence｜>", None),
        (deepseek, {"add_bos_token": None}, None, None),  # the file adds none
        (deepseek, {"add_eos_token": True}, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        (llama2, {"add_bos_token": False}, None, None),
        (llama2, {"add_bos_token": None, "add_eos_token": None}, "<s>", None),  # the file's own
        (llama2, {"tokenizer_class": None, "add_bos_token": False}, None, None),  # model_type
        (llama2, {"tokenizer_class": "GemmaTokenizerFast", "add_bos_token": False}, None, None),
        (llama2, {"tokenizer_class": "CohereTokenizer", "add_bos_token": False}, None, None),
        (llama2, {"tokenizer_class": "CodeLlamaTokenizer", "add_bos_token": False}, None, None),
        (
            gpt2,
            {"tokenizer_class": "GPTNeoXTokenizer", "add_eos_token": True},
            None,
            "<|endoftext|>",
        ),
        (phi3, {"add_bos_token": True}, "<s>", None),
        # Classes that do not.
        (
            llama2,
            {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False},
            "<s>",
            None,
        ),
        (qwen2, {"add_bos_token": True, "bos_token": "<|endoftext|>"}, None, None),
        (gpt2, {"add_bos_token": True}, None, None),
    ],
)
def test_add_bos_token_and_add_eos_token(tmp_path, make, config, bos, eos):
    shape = make()
    save(shape, tmp_path)
    configure(tmp_path, **config)
    if config == {"add_bos_token": None}:
        configure(tmp_path, add_eos_token=None)
    before, after = ([] if text is None else [shape.fast.token_to_id(text)] for text in (bos, eos))
    plain = shape.fast.encode("a b", add_special_tokens=False).ids
    assert Tokenizer(tmp_path).encode("a b") == before + plain + after


def test_bos_that_is_missing(tmp_path):
    save(qwen2(), tmp_path)
    configure(tmp_path, tokenizer_class="LlamaTokenizer", add_bos_token=True, bos_token=None)
    assert "tokenizer_config.json: add_bos_token is true, and bos_token" in refusal(tmp_path)
    save(llama2(), tmp_path)
    configure(tmp_path, bos_token=None)
    assert Tokenizer(tmp_path).special_tokens["bos_token"] == "<s>"  # the class's own
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "bos_token": null}'
    )
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: add_bos_token is true, and bos"):
        Tokenizer(tmp_path)


def test_no_token_is_made_up(tmp_path):
    """Roles that a class would fill with tokens that the vocabulary does not have."""
    shape = llama3()
    save(shape, tmp_path)
    for config in ({}, {"tokenizer_class": "LlamaTokenizer"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer(tmp_path)
        assert tokenizer.special_tokens == {}
        assert tokenizer.eos_token_ids == ()
        assert tokenizer.vocab_size == shape.fast.get_vocab_size()
        assert tokenizer.encode("<s>a") == shape.fast.encode("<s>a").ids


# -- tokens that other files know --


def test_added_tokens_decoder(folder):
    size = Tokenizer(folder).vocab_size
    added = {str(size): {"content": "<tool>", "special": True}, str(size + 1): {"content": "zzz"}}
    configure(folder, added_tokens_decoder=added)
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.encode("zzz<tool>")[1:] == [size + 1, size]
    pieces = [tokenizer.detokenizer([], True).add(token_id) for token_id in (size, size + 1)]
    assert pieces == ["", "zzz"]


def test_added_tokens_decoder_with_a_gap_is_refused(folder):
    added = {"5000": {"content": "<tool>", "special": True}}
    configure(folder, added_tokens_decoder=added)
    with pytest.raises(ValueError, match="'<tool>' has the id 5000 in added_tokens_decoder"):
        Tokenizer(folder)


def test_added_tokens_json(folder):
    size = Tokenizer(folder).vocab_size
    edit(folder / "added_tokens.json", **{"<tool>": size})
    assert Tokenizer(folder).encode("<tool>")[1:] == [size]


def test_the_files_tokens_are_not_changed(folder):
    token_id = Tokenizer(folder).special_token_id("<|eot_id|>")
    added = {str(token_id): {"content": "<|eot_id|>", "special": False, "lstrip": True}}
    configure(folder, added_tokens_decoder=added)
    tokenizer = Tokenizer(folder)
    assert tokenizer.detokenizer([], True).add(token_id) == ""
    assert len(tokenizer.encode("a <|eot_id|>")) == 4


def test_special_tokens_map(folder):
    configure(folder, eos_token=None, bos_token=None)
    edit(folder / "special_tokens_map.json", eos_token={"content": "<|eot_id|>"}, pad_token="[PAD]")
    tokenizer = Tokenizer(folder)
    assert tokenizer.special_tokens == {"eos_token": "<|eot_id|>", "pad_token": "[PAD]"}
    assert tokenizer.special_token_id("[PAD]") == tokenizer.vocab_size - 1
    assert tokenizer.eos_token_ids == (tokenizer.special_token_id("<|eot_id|>"),)


def test_token_of_the_vocabulary_becomes_special_by_its_role(folder):
    configure(folder, eos_token="the")
    tokenizer = Tokenizer(folder)
    [token_id] = tokenizer.encode("the")[1:]
    assert tokenizer.special_token_id("the") == token_id
    assert tokenizer.eos_token_ids == (token_id,)
    assert tokenizer.detokenizer([], True).add(token_id) == ""


def test_what_the_template_ends_turns_with_ends_answers(folder):
    configure(folder, eos_token="<|end_of_text|>", chat_template="{{ messages }}<|eot_id|>")
    tokenizer = Tokenizer(folder)
    names = ("<|end_of_text|>", "<|eot_id|>")
    assert tokenizer.eos_token_ids == tuple(map(tokenizer.special_token_id, names))
    configure(folder, chat_template="{{ messages }}")
    assert Tokenizer(folder).eos_token_ids == (tokenizer.special_token_id(names[0]),)


# -- chat templates --


@pytest.mark.parametrize("value", ["plain", [{"name": "default", "template": "plain"}]])
def test_chat_template_of_the_configuration(folder, value):
    configure(folder, chat_template=value)
    assert Tokenizer(folder).chat_template == "plain"


def test_no_chat_template(folder):
    assert Tokenizer(folder).chat_template is None


def test_chat_template_files(folder):
    edit(folder / "chat_template.json", chat_template="of a processor")
    assert Tokenizer(folder).chat_template == "of a processor"
    configure(folder, chat_template="old")
    assert Tokenizer(folder).chat_template == "old"
    (folder / "chat_template.jinja").write_text("new")
    assert Tokenizer(folder).chat_template == "new"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("tools")
    assert Tokenizer(folder).chat_template == {"default": "new", "tool_use": "tools"}


def test_template_sees_the_special_tokens(folder):
    configure(folder, chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    tokenizer = Tokenizer(folder)
    text = render(tokenizer.chat_template, tokenizer.special_tokens, Chat(HI, {}, True, False))
    assert text == "<|begin_of_text|>Hi<|eot_id|>"


# -- SentencePiece's own file --


def train(model_type: str, **options) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in corpus() for line in text.split("\n") if line),
        model_writer=written,
        model_type=model_type,
        vocab_size=1200,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return written.getvalue()


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("bpe", {**IDENTITY, "byte_fallback": True, "split_digits": True}),
        ("bpe", {**IDENTITY, "byte_fallback": True, "add_dummy_prefix": False,
                 "user_defined_symbols": ["▁▁", "<b>"], "allow_whitespace_only_pieces": True}),
        ("bpe", {**IDENTITY, "split_by_whitespace": False}),
    ],
    ids=["Llama 2", "Gemma", "no bytes"],
)  # fmt: skip
def test_sentencepiece_model(tmp_path, model_type, options):
    model = train(model_type, **options)
    (tmp_path / "tokenizer.model").write_bytes(model)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    loaded = Tokenizer(tmp_path)
    texts = random_texts(1000, seed=5)
    wanted = [[1, *reference.encode(text)] for text in texts]
    assert [loaded.encode(text) for text in texts] == wanted
    assert loaded.eos_token_ids == (2,)
    assert loaded.vocab_size == reference.get_piece_size()
    if options.get("byte_fallback"):
        for text in texts[:200]:
            stream = loaded.detokenizer([], True)
            pieces = [stream.add(token_id) for token_id in reference.encode(text)]
            assert "".join(pieces) + stream.finish() == reference.decode(reference.encode(text))


def test_sentencepiece_unigram_model(tmp_path):
    model = train("unigram", **IDENTITY, byte_fallback=True)
    (tmp_path / "tokenizer.model").write_bytes(model)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    loaded = Tokenizer(tmp_path)
    texts = random_texts(1000, seed=5)
    wanted = [reference.encode(text) for text in texts]
    got = [loaded.encode(text)[1:] for text in texts]
    different = [pair for pair in zip(got, wanted, strict=True) if pair[0] != pair[1]]
    assert len(different) < 20
    for mine, theirs in different:  # in runs of one character: of equal scores either is right
        assert reference.decode(mine) == reference.decode(theirs)
        assert sum(map(reference.get_score, mine)) == pytest.approx(
            sum(map(reference.get_score, theirs)), rel=1e-5
        )


def test_sentencepiece_model_with_other_files(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train("bpe", **IDENTITY, byte_fallback=True))
    plain = Tokenizer(tmp_path)
    added = {str(plain.vocab_size): {"content": "<|im_end|>", "special": True}}
    configure(tmp_path, add_bos_token=False, added_tokens_decoder=added, eos_token="<|im_end|>")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("a<|im_end|>") == [*plain.encode("a")[1:], plain.vocab_size]
    assert tokenizer.eos_token_ids == (plain.vocab_size,)


# -- files that are missing or broken --


def refusal(folder) -> str:
    with pytest.raises(ValueError, match="token") as refused:
        Tokenizer(folder)
    assert "`tiktoken` is required" not in str(refused.value)
    return str(refused.value)


def test_no_tokenizer_at_all(tmp_path):
    assert refusal(tmp_path).startswith(f"{tmp_path} has no tokenizer.json. {tmp_path}/tokenizer.j")
    assert "AutoTokenizer" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["tekken.json", "qwen.tiktoken"])
def test_format_that_is_not_supported(tmp_path, name):
    (tmp_path / name).write_text("{}")
    assert f"has no tokenizer.json (it has {name}, which is not supported)" in refusal(tmp_path)


def test_tokenizer_model_of_tiktoken(tmp_path):
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    assert refusal(tmp_path).startswith(f"{tmp_path}/tokenizer.model is not a SentencePiece model")
    assert f"{tmp_path}/tokenizer.json is needed" in refusal(tmp_path)


def test_broken_tokenizer_model(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    assert refusal(tmp_path).startswith(f"{path} is a git-lfs pointer")
    whole = train("bpe")
    for broken in (b"\n", whole[: len(whole) // 2 + 1], b"\x08\x01", b"\x0a\x02\x0a\xff"):
        path.write_bytes(broken)
        assert refusal(tmp_path).startswith(f"{path} is not a SentencePiece model")


def test_tokenizer_model_of_a_class_with_rules_of_its_own(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train("bpe"))
    configure(tmp_path, tokenizer_class="XLNetTokenizer")
    assert "belongs to a XLNetTokenizer, which is not supported" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a git-lfs pointer"),
        ('{\n  "a": 1,\n  "b": \n', "is not valid JSON: line 4, column 1: Expecting value"),
        ("", "is empty; its copy or download was broken off"),
        ("[1]", "should hold a JSON object, not [1]"),
        (b'{"a": "\xff"}', "is not UTF-8 text: byte 0xff at 7"),
    ],
    ids=["lfs", "cut", "empty", "list", "bytes"],
)
def test_broken_file(folder, name, content, message):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refusal(folder).startswith(f"{folder / name} {message}")


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": ["<x>"]},
        {"added_tokens_decoder": {"9999": 5}},
        {"added_tokens_decoder": {"x": {"content": "<x>"}}},
        {"chat_template": ["{{ messages }}"]},
        {"chat_template": [{"name": "default"}]},
        {"additional_special_tokens": 5},
    ],
)
def test_values_of_unexpected_types(folder, config):
    configure(folder, **config)
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize("name", ["tokenizer_class", "bos_token", "eos_token", "add_bos_token"])
@pytest.mark.parametrize("value", [7, [], {}, True])
def test_values_that_mean_nothing_are_those_of_no_key(folder, name, value):
    configure(folder, **{name: None})
    wanted = Tokenizer(folder).encode("a b")
    configure(folder, **{name: value})
    assert Tokenizer(folder).encode("a b") == wanted


def test_tokenizer_json_of_another_kind(folder):
    (folder / "tokenizer.json").write_text('{"version": "9.0"}')
    assert refusal(folder).startswith(f"{folder}/tokenizer.json cannot be read by tokenizers 0.")


def test_nothing_is_asked_about_remote_code(tmp_path, monkeypatch):
    """A tokenizer that names code of its own."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    names = {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}
    configure(tmp_path, auto_map=names, tokenizer_class="XTokenizer")
    (tmp_path / "tokenization_x.py").write_text("raise SystemExit('ran')")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert "its vocab.json and merges.txt cannot be read" in refusal(tmp_path)
    save(qwen2(), tmp_path)
    configure(tmp_path, auto_map=names)
    assert Tokenizer(tmp_path).encode("a")


def test_vocab_json_and_merges_txt(tmp_path):
    shape = gpt2()
    model = json.loads(shape.fast.to_str())["model"]
    vocab = model["vocab"] | {"<|endoftext|>": shape.fast.token_to_id("<|endoftext|>")}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(shape.config))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer(tmp_path)
    for text in random_texts(200, seed=6, special=shape.special):
        assert tokenizer.encode(text) == shape.fast.encode(text).ids
    assert tokenizer.eos_token_ids == (vocab["<|endoftext|>"],)


def test_added_token_keeps_its_properties(folder):
    size = Tokenizer(folder).vocab_size
    token = {"content": "<x>", "special": False, "rstrip": True, "normalized": False}
    configure(folder, added_tokens_decoder={str(size): token})
    added = load_folder(folder).fast.get_added_tokens_decoder()[size]
    assert repr(added) == repr(AddedToken("<x>", rstrip=True, normalized=False))
