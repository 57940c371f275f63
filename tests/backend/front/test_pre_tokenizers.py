"""The splitting of texts by the names of tokenizer.ggml.pre.

What each name must give was written by llama.cpp itself: its unicode_regex_split with the patterns
of its llm_tokenizer_bpe (b11434, September 2026).
"""

import pytest

from tritium.backend.front import pre_tokenizers

TEXT = (
    "I'm he'LL a:   7 1234567 (x)=/y\n\n\t  camelCASE's ÀÉte\u0301 ñandú 你好、世"
    "界 カナ。한국 ½Ⅷ ٣٤ 😀!!\r\n`$^a_b… 12,345.6 'sad       end "
)

# Pieces by names, separated by ¦.
PIECES = {
    ("default"): (
        "I¦'¦m¦ he¦'¦LL¦ a¦:¦  ¦ ¦7¦ ¦123¦456¦7¦ ¦(¦x¦)=/¦y¦\n\n\t ¦ camelCASE¦"
        "'¦s¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、¦世界¦ カナ¦。¦한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀¦!!¦\r¦\n¦`¦$^¦a"
        "¦_¦b¦…¦ ¦12¦,¦345¦.¦6¦ ¦'¦sad¦      ¦ end¦ "
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx "
        "smaug-bpe chatglm-bpe glm4 glm5"
    ): (
        "I¦'m¦ he¦'LL¦ a¦:¦  ¦ ¦7¦ ¦123¦456¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCASE¦'s"
        "¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n¦`$^¦a¦_b¦…¦ ¦1"
        "2¦,¦345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("minicpm5"): (
        "I¦'m¦ he¦'LL¦ a¦:¦   ¦7¦ ¦123¦456¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCASE¦'s¦"
        " ÀÉte¦\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n¦`$^¦a¦_b¦…¦ ¦12"
        "¦,¦345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("jais-2"): (
        "I¦'m¦ he¦'LL¦ a¦:¦  ¦ ¦7¦ ¦123¦456¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCASE¦'s"
        "¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n¦`$^¦a¦_b¦…¦ ¦1"
        "2¦,¦345¦.¦6¦ '¦sad¦    ¦  ¦ end¦ "
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
        "ufakzeka bailingmoe bailingmoe2 llada-moe"
    ): (
        "I¦'m¦ he¦'LL¦ a¦:¦  ¦ ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCAS"
        "E¦'s¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀!!\r\n¦`$^¦a¦_b"
        "¦…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("qwen35"): (
        "I¦'m¦ he¦'LL¦ a¦:¦  ¦ ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCAS"
        "E¦'s¦ ÀÉte\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀!!\r\n¦`$^¦a¦_b¦"
        "…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("laguna"): (
        "I¦'m¦ he¦'LL¦ a¦:¦  ¦ ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCAS"
        "E¦'s¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀!!\r¦\n¦`$^¦a¦_"
        "b¦…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("seed-coder"): (
        "I¦'m¦ he¦'LL¦ a¦:¦  ¦ ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCAS"
        "E¦'s¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀!!¦\r\n¦`$^¦a¦_"
        "b¦…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("exaone-moe"): (
        "I¦'m¦ he¦'LL¦ a¦:¦  ¦ ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCAS"
        "E¦'s¦ ÀÉte\u0301 ñandú 你好¦、世界 カナ¦。한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀!!\r¦\n¦`$^¦a¦_b¦…¦"
        " ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum "
        "modern-bert jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion "
        "granite-docling exaone4"
    ): (
        "I¦'m¦ he¦'¦LL¦ a¦:¦  ¦ 7¦ 1234567¦ (¦x¦)=/¦y¦\n\n\t ¦ camelCASE¦'s¦ ÀÉ"
        "te¦\u0301¦ ñandú¦ 你好¦、¦世界¦ カナ¦。¦한국¦ ½Ⅷ¦ ٣٤¦ 😀!!¦\r¦\n¦`$^¦a¦_¦b¦…¦ 12¦"
        ",¦345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"): (
        "I¦'m¦ he¦'¦LL¦ a¦:¦   ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)=/¦y¦\n\n\t ¦ camelCASE"
        "¦'s¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、¦世界¦ カナ¦。¦한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀!!¦\r¦\n¦`$^¦a"
        "¦_¦b¦…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("falcon"): (
        "I¦'¦m¦ he¦'¦LL¦ a¦:¦  ¦ 7¦ ¦123¦456¦7¦ ¦(¦x¦)=/¦y¦\n\n\t ¦ camelCASE¦'"
        "¦s¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、¦世界¦ カナ¦。¦한국¦ ½Ⅷ¦ ٣٤¦ 😀¦!!¦\r\n¦`$^¦a¦_¦b¦"
        "…¦ 12¦,¦345¦.¦6¦ ¦'¦sad¦      ¦ end¦ "
    ),
    ("deepseek-llm"): (
        "I¦'¦m¦ he¦'¦LL¦ a¦:¦   ¦7¦ ¦1234567¦ (¦x¦)=/¦y¦\n¦\n¦\t ¦ camelCASE¦'¦"
        "s¦ ÀÉ¦te¦\u0301¦ ñ¦and¦ú¦ ¦你好¦、¦世界¦ ¦カナ¦。¦한국¦ ¦½¦Ⅷ¦ ¦٣٤¦ 😀¦!!¦\r¦\n¦`$"
        "^¦a¦_¦b¦…¦ ¦12¦,¦345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("deepseek-coder"): (
        "I¦'¦m¦ he¦'¦LL¦ a¦:¦   ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)¦=¦/¦y¦\n¦\n¦\t ¦ came"
        "lCASE¦'¦s¦ ÀÉte¦\u0301¦ ñandú¦ ¦你好¦、¦世界¦ ¦カナ¦。¦한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀¦!!¦\r"
        "¦\n¦`$^¦a¦_¦b¦…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4"): (
        "I¦'m¦ he¦'LL¦ a¦:¦   ¦7¦ ¦123¦456¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCASE¦'s¦"
        " ÀÉte\u0301¦ ñandú¦ ¦你好¦、¦世界¦ ¦カナ¦。¦한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n¦`$^¦a¦_b¦…¦ "
        "¦12¦,¦345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("spark2_5"): (
        "I¦'m¦ he¦'LL¦ a¦:¦   ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)=/¦y¦\n¦\n¦\t ¦ camelCAS"
        "E¦'s¦ ÀÉte\u0301¦ ñandú¦ ¦你好¦、¦世界¦ ¦カナ¦。¦한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀!!¦\r¦\n¦`$^"
        "¦a¦_b¦…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("youtu"): (
        "I'm¦ he'LL¦ a¦:¦  ¦ ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCASE'"
        "s¦ ÀÉte\u0301¦ ñandú¦ ¦你好¦、¦世界¦ ¦カナ¦。¦한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀!!\r\n¦`$^¦a¦_b"
        "¦…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("tekken"): (
        "I¦'m¦ he¦'LL¦ a¦:¦  ¦ ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camel¦CA"
        "SE¦'s¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀!!\r\n¦`$^¦a¦_"
        "b¦…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2"): (
        "I'm¦ he'LL¦ a¦:¦  ¦ ¦7¦ ¦123¦456¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camel¦CASE's¦ "
        "ÀÉte¦\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n¦`$^¦a¦_b¦…¦ ¦12¦"
        ",¦345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("granite-embed-multi-97m"): (
        "I'm¦ he'LL¦ a¦:¦  ¦ ¦7¦ ¦123¦456¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camel¦CASE's¦ "
        "ÀÉte\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n¦`$^¦a¦_b¦…¦ ¦12¦,"
        "¦345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("tiny_aya cohere2moe"): (
        "I'm¦ he'LL¦ a¦:¦  ¦ ¦7¦ ¦1¦234¦567¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCASE's¦ À"
        "Éte\u0301¦ ñandú¦ 你好¦、世界¦ カナ¦。한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n¦`$^¦a¦_b¦…¦ ¦12¦,¦"
        "345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("afmoe"): (
        "I¦'m¦ he¦'LL¦ a¦:¦  ¦ ¦7¦ ¦1¦234¦567¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCASE¦'s"
        "¦ ÀÉte\u0301¦ ñandú¦ ¦你好¦、¦世界¦ ¦カナ¦。¦한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n¦`$^¦a¦_b¦…¦"
        " ¦12¦,¦345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("superbpe"): (
        "I'm he'LL a:   ¦7¦ ¦1¦234¦567¦ (x)=/y\n\n\t  camelCASE's ÀÉte\u0301 ña"
        "ndú 你好、世界 カナ。한국 ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n`$^a_b… ¦12¦,¦345¦.¦6¦ 'sad       end"
        " "
    ),
    ("kimi-k2"): (
        "I'm¦ he'LL¦ a¦:¦  ¦ ¦7¦ ¦123¦456¦7¦ (¦x¦)=/¦y¦\n\n¦\t ¦ camelCASE's¦ À"
        "Éte¦\u0301¦ ñandú¦ ¦你好¦、¦世界¦ カナ¦。한국¦ ¦½Ⅷ¦ ¦٣٤¦ 😀!!\r\n¦`$^¦a¦_b¦…¦ ¦12"
        "¦,¦345¦.¦6¦ '¦sad¦      ¦ end¦ "
    ),
    ("poro-chat bloom gpt3-finnish"): (
        "I'm¦ he'LL¦ a:¦  ¦ 7¦ 1234567¦ (¦x¦)¦=/y¦\n\n\t ¦ camelCASE's¦ ÀÉte\u0301"
        "¦ ñandú¦ 你好¦、¦世界¦ カナ¦。¦한국¦ ½Ⅷ¦ ٣٤¦ 😀¦!!\r\n¦`$^a_b¦…¦ 12¦,¦345¦.¦6¦ 's"
        "ad¦      ¦ end¦ "
    ),
    ("viking"): (
        "I'm¦ he'LL¦ a:¦  ¦ ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ (¦x¦)¦=/y¦\n\n\t ¦ camelCASE's¦"
        " ÀÉte\u0301¦ ñandú¦ 你好¦、¦世界¦ カナ¦。¦한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀¦!!\r\n¦`$^a_b¦…¦ ¦"
        "1¦2¦,¦3¦4¦5¦.¦6¦ 'sad¦      ¦ end¦ "
    ),
    ("chameleon"): (
        "I¦'¦m¦ he¦'¦LL¦ a¦:¦  ¦ ¦7¦ ¦1¦2¦3¦4¦5¦6¦7¦ ¦(¦x¦)¦=¦/¦y¦\n¦\n¦\t¦  ¦c"
        "amelCASE¦'¦s¦ ÀÉte¦\u0301¦ ñandú¦ 你好¦、¦世界¦ カナ¦。¦한국¦ ¦½¦Ⅷ¦ ¦٣¦٤¦ 😀¦!¦!¦"
        "\r¦\n¦`¦$¦^¦a¦_¦b¦…¦ ¦1¦2¦,¦3¦4¦5¦.¦6¦ ¦'¦sad¦    ¦  ¦ end¦ "
    ),
}

NAMES = [(name, pieces) for names, pieces in PIECES.items() for name in names.split()]
LLAMA3 = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
}
ADDS_BOS = LLAMA3 | {"chameleon"}
IGNORES_MERGES = LLAMA3 | {"glm4", "glm5", "minicpm5", "youtu", "granite-embed-multi-97m"}


@pytest.mark.parametrize(("name", "pieces"), NAMES, ids=[name for name, _ in NAMES])
def test_pieces(name, pieces):
    split = pre_tokenizers.byte_level(pre_tokenizers.rules(name).patterns).pre_tokenize_str(TEXT)
    assert "¦".join(TEXT[start:end] for _, (start, end) in split) == pieces


@pytest.mark.parametrize("name", [name for name, _ in NAMES])
def test_rules_that_come_with_a_name(name):
    rules = pre_tokenizers.rules(name)
    assert rules.adds_bos == (name in ADDS_BOS)
    assert rules.ignores_merges == (name in IGNORES_MERGES)


def test_unknown_name_is_refused_with_the_list():
    with pytest.raises(ValueError, match="'smallm' is unknown") as refused:
        pre_tokenizers.rules("smallm")
    assert "qwen2, qwen35, refact" in str(refused.value)


@pytest.mark.parametrize("name", ["gemma4", "whitespace", "sarvam-moe"])
def test_name_of_another_kind_of_tokenizer_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.*not supported"):
        pre_tokenizers.rules(name)
