"""Small tokenizers in the shapes of well-known models, trained on made-up texts.

Each has the normalizer, pre-tokenizer, decoder, post-processor and tokenizer_config.json of its
model, so that what reads them has the same decisions to make.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from tests.texts import random_texts

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class Shape(NamedTuple):
    """A tokenizer as it lies in a folder."""

    fast: tokenizers.Tokenizer
    config: dict[str, Any]  # tokenizer_config.json
    model_type: str
    special: tuple[str, ...]
    bos: str | None = None  # is put before a text


def save(shape: Shape, folder: Path) -> None:
    shape.fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(shape.config))
    (folder / "config.json").write_text(json.dumps({"model_type": shape.model_type}))


@cache
def corpus() -> list[str]:
    return random_texts(1500, seed=1)


def split(*patterns: str) -> pre.PreTokenizer:
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(
    pre_tokenizer: pre.PreTokenizer,
    special: tuple[str, ...],
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    fast = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    fast.pre_tokenizer = pre_tokenizer
    if normalizer:
        fast.normalizer = normalizer
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator(corpus(), trainer)
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return fast


def sentencepiece(
    special: tuple[str, ...], prefix: bool, user_defined: tuple[str, ...] = ()
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE with bytes, as converters write it."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre.Metaspace(prepend_scheme="always" if prefix else "never")
    trainer = trainers.BpeTrainer(vocab_size=1500, limit_alphabet=250, show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    model = json.loads(trained.to_str())["model"]
    texts = dict.fromkeys([*special, *user_defined, *BYTES, *model["vocab"]])
    vocabulary = {text: i for i, text in enumerate(texts)}
    merges = [tuple(merge) for merge in model["merges"]]
    fast = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    first = [normalizers.Prepend("▁")] if prefix else []
    fast.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    fast.add_tokens([AddedToken(text, normalized=False) for text in user_defined])
    return fast


def with_bos(fast: tokenizers.Tokenizer, bos: str) -> tokenizers.Tokenizer:
    fast.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, fast.token_to_id(bos))]
    )
    return fast


def gpt2() -> Shape:
    special = ("<|endoftext|>",)
    fast = byte_level(pre.ByteLevel(add_prefix_space=False), special)
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), special[0])
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **names}
    return Shape(fast, config, "gpt2", special)


def smollm() -> Shape:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    digits = pre.Digits(individual_digits=True)
    fast = byte_level(pre.Sequence([digits, pre.ByteLevel(add_prefix_space=False)]), special)
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": special[1], "eos_token": special[2]}
    return Shape(fast, config, "llama", special)


def llama2() -> Shape:
    special = ("<unk>", "<s>", "</s>")
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "unk_token": {"__type": "AddedToken", "content": "<unk>"},
    }
    return Shape(with_bos(sentencepiece(special, True), "<s>"), config, "llama", special, "<s>")


def tinyllama() -> Shape:
    shape = llama2()
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    return shape._replace(config=config)


def mistral() -> Shape:
    special = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    fast = with_bos(sentencepiece(special, True), "<s>")
    fast.normalizer = None  # type: ignore[assignment]
    fast.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    config = {"tokenizer_class": "LlamaTokenizerFast", "legacy": False, **names}
    return Shape(fast, config, "mistral", special, "<s>")


def phi3() -> Shape:
    special = ("<unk>", "<s>", "</s>")
    fast = sentencepiece(special, True)
    turns = ("<|user|>", "<|assistant|>", "<|end|>")
    fast.add_special_tokens([AddedToken(text, rstrip=True, normalized=False) for text in turns])
    names = {"bos_token": "<s>", "eos_token": "<|end|>", "add_bos_token": False}
    config = {"tokenizer_class": "LlamaTokenizer", **names}
    return Shape(fast, config, "phi3", special + turns)


def gemma() -> Shape:
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    fast = sentencepiece(special, False, user_defined=("\n\n", "\n\n\n", "  ", "   ", "<b>"))
    fast.pre_tokenizer = pre.Split(" ", "merged_with_previous")
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    config = {"tokenizer_class": "GemmaTokenizer", **names, "add_eos_token": False}
    return Shape(with_bos(fast, "<bos>"), config, "gemma2", special, "<bos>")


def llama3() -> Shape:
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>")
    fast = byte_level(split(LLAMA3), special, ignore_merges=True)
    bos = with_bos(fast, special[0]).post_processor
    fast.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    names = {"bos_token": special[0], "eos_token": special[2]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    return Shape(fast, config, "llama", special, special[0])


def qwen2() -> Shape:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    fast = byte_level(split(QWEN2), special, normalizers.NFC())
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    names = {"bos_token": None, "eos_token": special[2], "add_bos_token": False}
    return Shape(fast, {"tokenizer_class": "Qwen2Tokenizer", **names}, "qwen2", special)


def qwen2_without_class() -> Shape:
    shape = qwen2()
    shape.fast.normalizer = normalizers.NFKC()  # its own, not that of the model type
    return shape._replace(config={"eos_token": "<|im_end|>"})


def deepseek() -> Shape:
    """DeepSeek-R1-Distill: BOS comes from tokenizer_config.json only."""
    special = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>")
    patterns = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    fast = byte_level(split(*patterns), special)
    names = {"bos_token": {"content": special[0]}, "eos_token": {"content": special[1]}}
    flags = {"add_bos_token": True, "add_eos_token": False}
    config = {"tokenizer_class": "LlamaTokenizerFast", **names, **flags}
    return Shape(fast, config, "qwen2", special, special[0])


def tekken() -> Shape:
    special = ("<unk>", "<s>", "</s>", "[INST]")
    fast = with_bos(byte_level(split(TEKKEN), special, ignore_merges=True), "<s>")
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return Shape(
        fast, {"tokenizer_class": "LlamaTokenizerFast", **names}, "mistral", special, "<s>"
    )


def falcon() -> Shape:
    special = ("<|endoftext|>",)
    steps = [
        pre.Punctuation("contiguous"),
        pre.ByteLevel(add_prefix_space=False),
        pre.Digits(individual_digits=False),
        pre.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
    fast = byte_level(pre.Sequence(steps), special)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0]}
    return Shape(fast, config, "falcon", special)


def cohere() -> Shape:
    special = ("<PAD>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")
    digits = pre.Digits(individual_digits=True)
    fast = byte_level(
        pre.Sequence([digits, pre.ByteLevel(add_prefix_space=False)]), special, normalizers.NFC()
    )
    flags = {"add_bos_token": True, "bos_token": special[1], "eos_token": special[2]}
    config = {"tokenizer_class": "CohereTokenizer", **flags}
    return Shape(with_bos(fast, special[1]), config, "cohere", special, special[1])


SHAPES = (
    *(gpt2, smollm, llama2, tinyllama, mistral, phi3, gemma, llama3, qwen2, qwen2_without_class),
    *(deepseek, tekken, falcon, cohere),
)
