r"""How texts are split before byte-level BPE, by the name in a GGUF file (`tokenizer.ggml.pre`).

The names, patterns and rules are those of llama.cpp (src/llama-vocab.cpp and src/unicode.cpp of
https://github.com/ggml-org/llama.cpp), in Oniguruma's syntax. Where llama.cpp's own splitting
differs from the tokenizer.json that a model came with, it is llama.cpp's that is written here: its
classes of letters do not tell upper from lower case outside of ASCII (`\p{Lu}` is `\p{L}`), and in
patterns without `\p` a blank outside of ASCII is no member of any range.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers


class Rules(NamedTuple):
    """What a name stands for."""

    patterns: tuple[str, ...]  # applied one after another; matches and gaps are pieces
    adds_bos: bool = False  # unless the file says otherwise
    ignores_merges: bool = False  # a piece that is a token is that token


def rules(name: str) -> Rules:
    """The rules of a name.

    Raises:
        ValueError: the name is unknown or not supported.
    """
    if name in _NOT_SUPPORTED:
        raise ValueError(f"tokenizer.ggml.pre {name!r}: this kind of tokenizer is not supported")
    if name not in _RULES:
        known = ", ".join(sorted(_RULES))
        raise ValueError(f"tokenizer.ggml.pre {name[:64]!r} is unknown. Known are {known}")
    return _RULES[name]


def byte_level(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that splits by patterns and then writes bytes as byte-level BPE does."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


# -- the parts of the patterns --

_DIGIT = r"\p{N}"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # of an English word
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_KANA = r"\x{3040}-\x{309f}\x{30a0}-\x{30ff}"
_HAN = rf"[\x{{4e00}}-\x{{9fa5}}{_KANA}]+"
_CJK = r"[[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]&&\S]+"
_SENTENCE_SIGNS = r".,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c}"
_BLOOM = rf" ?[^(\s|{_SENTENCE_SIGNS})]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEEPSEEK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"

_CASED_LETTERS = (
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}"
    r"\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}"
    r"\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}"
    r"\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}"
    r"\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}"
    r"\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}"
    r"\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}"
    r"\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}"
    r"\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}"
    r"\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}"
    r"\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}"
    r"\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}"
    r"\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}"
    r"\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}"
    r"\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}"
    r"\x{1e900}-\x{1e943}"
)

# Digits in groups of three from the right, each first group with all that stands before it.
_THREES_FROM_THE_RIGHT = r"\P{N}*+\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N}))|\P{N}+"

_ASIAN = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{8c48}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}"
    r"\x{2f00}-\x{2fdf}\x{e40}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}"
    r"\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+"
)
_KIMI_HAN = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}"
    r"\x{f900}-\x{faff}\x{2f800}-\x{2fa1f}]"
)


def _words(digits: str, signs: str = _SIGNS, suffix: str = _SUFFIX, word: str = _WORD) -> str:
    """The family of Llama 3 and Qwen 2."""
    return f"{suffix}|{word}|{digits}|{signs}|{_BLANKS}"


def _cased(letters: str, suffix: str, digits: str) -> str:
    """The family of GPT-4o: words end before an upper-case ASCII letter."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


def _uncased(digits: str) -> str:
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_SUFFIX}?"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


# -- the patterns --

_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_PLAIN = (_GPT2,)
_DIGITS = (_DIGIT, _GPT2)
_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(_DIGIT),)
_DEEPSEEK_V3 = (r"\p{N}{1,3}", _HAN, _DEEPSEEK3)
_CHATGLM = _LLAMA3
_GPT4O = (_cased(r"\p{L}", f"{_SUFFIX}?", r"\p{N}{1,3}"),)
_BAILING = (
    rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SIGNS}"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
)
_TINY_AYA = (_THREES_FROM_THE_RIGHT, _uncased(r"\p{N}{1,3}"))
_SARVAM_KINDS = "gemma4 granite-embed-multi-311m mmbert sarvam-moe whitespace"

_NOT_SUPPORTED = frozenset(_SARVAM_KINDS.split())  # SentencePiece's alphabet with merges


def _table() -> Iterator[tuple[str, Rules]]:
    yield "default", Rules(_DEFAULT)
    for names, rule in (
        (
            "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
            Rules(_LLAMA3, adds_bos=True, ignores_merges=True),
        ),
        ("dbrx smaug-bpe", Rules(_LLAMA3)),
        ("chatglm-bpe", Rules(_CHATGLM)),
        ("glm4 glm5", Rules(_CHATGLM, ignores_merges=True)),
        ("minicpm5", Rules((r"\p{N}{1,3}", _words(r"\p{N}+")), ignores_merges=True)),
        (
            "jais-2",
            Rules(
                (
                    rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
                    + "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32"))
                    + r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
                )
            ),
        ),
        (
            "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
            Rules(_QWEN2),
        ),
        (
            "qwen35",
            Rules(
                (
                    _words(
                        _DIGIT,
                        signs=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                        word=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                    ),
                )
            ),
        ),
        ("ufakzeka", Rules((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}",))),
        ("laguna", Rules((r"[^\n]+|[\n]+", *_QWEN2))),
        ("seed-coder", Rules((_words(_DIGIT, signs=r" ?[^\s\p{L}\p{N}\r\n]+"),))),
        ("bailingmoe bailingmoe2 llada-moe", Rules(_BAILING)),
        (
            "exaone-moe",
            Rules(
                (
                    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
                    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
                )
            ),
        ),
        (
            "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
            "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4",
            Rules(_PLAIN),
        ),
        (
            "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
            Rules(_DIGITS),
        ),
        ("falcon", Rules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
        (
            "deepseek-llm",
            Rules(
                (
                    r"[\r\n]",
                    rf"\s?[{_CASED_LETTERS}]+",
                    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}"
                    r"\x{3001}-\x{3002}]+",
                    r"\s+$",
                    _CJK,
                    r"\p{N}+",
                )
            ),
        ),
        ("deepseek-coder", Rules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT))),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Rules(_DEEPSEEK_V3)),
        (
            "spark2_5",
            Rules(
                (
                    r"\p{N}{1,3}",
                    _HAN,
                    rf"{_DEEPSEEK}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
                    _DIGIT,
                )
            ),
        ),
        (
            "youtu",
            Rules(
                (
                    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+"
                    r"|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}"
                    r"\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+"
                    rf"|[\x{{3105}}-\x{{312f}}]+|{_HAN}",
                    _uncased(_DIGIT),
                ),
                ignores_merges=True,
            ),
        ),
        (
            "tekken",
            Rules((_cased(r"\p{L}", "", _DIGIT),), adds_bos=True, ignores_merges=True),
        ),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", Rules(_GPT4O)),
        (
            "granite-embed-multi-97m",
            Rules(
                (_cased(r"\p{L}\p{M}", f"{_SUFFIX}?", r"\p{N}{1,3}"),),
                ignores_merges=True,
            ),
        ),
        ("tiny_aya cohere2moe", Rules(_TINY_AYA)),
        ("afmoe", Rules((_THREES_FROM_THE_RIGHT, _ASIAN, _DEEPSEEK3))),
        (
            "superbpe",
            Rules((r"\p{N}+", r"\p{N}+?(?=(?:[0-9]{3})+(?![0-9]))|\p{N}+")),
        ),
        (
            "kimi-k2",
            Rules(
                (
                    rf"{_KIMI_HAN}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_KIMI_HAN}]]+{_SUFFIX}?"
                    rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}",
                )
            ),
        ),
        ("poro-chat bloom gpt3-finnish", Rules((_BLOOM,))),
        ("viking", Rules((_BLOOM, _DIGIT))),
        (
            "chameleon",
            Rules(
                (
                    "<sentinel:[0-9]+>",
                    "IMGIMG[A-I]{1,4}Z",
                    r"[\t\n]|    |  ",
                    _DIGIT,
                    r"[\p{P}!-/:-@\[-`{-~]",
                    _GPT2,
                ),
                adds_bos=True,
            ),
        ),
    ):
        for name in names.split():
            yield name, rule


_RULES = dict(_table())
