"""Made-up texts for comparing tokenizers: code, digits, many scripts, emoji, blanks, signs."""

import random

_WORDS = (
    "the of and Hello World tokenizer's don't I'LL we've it's HTTPServer camelCase "
    "snake_case café naïve Übergröße Straße привет мир Καλημέρα κόσμε مرحبا بالعالم "
    "שלום नमस्ते ภาษาไทย ສະບາຍດີ မင်္ဂလာ 你好 世界 今天天气 日本語 カタカナ "
    "ひらがな 한국어 텍스트 ㄅㄆㄇ ḿ ǅ Ⅷ "
    "½ ² ٣٤٥ ४५ e\u0301 x\u0308y def return lambda print(f'{x}') <html> </div> "
    '{"key": [1,2]} a+b=c $x ^y ~z `q` |r| https://example.com/a?b=c#d '
    "user@mail.org C:\\path #include <stdio.h> // -- /* */ != <= >> := 1234567 12 3 "
    "007 3.14159 1,000,000 0xFF 1e-9 ١٢٣ 2024-01-31 12:30:59 👩🏽\u200d🚀 🇨🇳 ❤️ 🚀🚀 "
    "👨\u200d👩\u200d👧 ¿ ¡ … — “quoted” ‘x’ "
    "« » 。 ， ！ 、 ？ ％ ￥ § © ™ ° 𝔘𝔫𝔦 𐐷 豈 々 〇 Ａｂｃ "
    "１２ \ufffd ſ K"
)
_BLANKS = (
    *[" "] * 14, "", "", "", "  ", "   ", "    ", " " * 7, " " * 17, "\n", "\n\n", "\n\n\n", "\r\n",
    "\t", "\t\t", " \n", "\n  ", " \t ", "\xa0", "\u3000", "\u2003", "\u2028", "\x0b", "\x85",
)  # fmt: skip
_RANGES = ((0x20, 0x250), (0x250, 0xD800), (0x1F300, 0x1FAFF))  # of characters


def random_texts(count: int, seed: int, special: tuple[str, ...] = ()) -> list[str]:
    """Texts of up to some twenty words each, some of them with special tokens in between."""
    rng = random.Random(seed)
    return [_text(rng, special) for _ in range(count)]


def _text(rng: random.Random, special: tuple[str, ...]) -> str:
    parts = []
    for _ in range(rng.choice((1, 2, 3, 5, 8, 20))):
        kind = rng.random()
        if special and kind < 0.08:
            parts.append(rng.choice(special))
        elif kind < 0.12:
            ranges = rng.choices(_RANGES, k=rng.randrange(1, 4))
            parts += [chr(rng.randrange(*each)) for each in ranges]
        elif kind < 0.17:
            parts.append(rng.choice("=-.a1 \n\t_#*!é你") * rng.randrange(1, 40))
        elif kind < 0.25:
            parts.append(str(rng.randrange(10 ** rng.randrange(1, 14))))
        else:
            word = rng.choice(_WORDS.split(" "))
            parts.append(rng.choice((word, word, word, word.upper(), word.title())))
        parts.append(rng.choice(_BLANKS))
    if rng.random() < 0.5:
        parts.pop()
    return "".join(parts)
