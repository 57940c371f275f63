"""24 prompts of many kinds, for comparing generated texts."""

_LONG = " ".join(
    f"Item {i}: the {['red', 'green', 'blue', 'grey'][i % 4]} box holds {i * i % 97} coins."
    for i in range(160)
)

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "The three laws of thermodynamics are:",
    "List five fruits:\n1.",
    "Dear Sir or Madam,\n\n",
    "Q: What is 17 + 25?\nA:",
    "  leading spaces and\ttabs",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self",
    "SELECT name, COUNT(*) FROM users WHERE",
    '{"name": "Alice", "age": 30, "tags": [',
    "你好,请介绍一下北京。",
    "从前有一座山,山上有一座庙,",
    "日本の首都は",
    "Москва - это",
    "Los números primos menores que veinte son",
    "Ça va être une belle journée à l'été",
    "😀😀😀😀",
    "I ❤️ 👩‍👩‍👧‍👦 and 🇫🇷! 👍🏽",
    "e\u0301 is e + combining acute; n\u0303",
    "<|im_start|>user\nTell me a joke.<|im_end|>\n<|im_start|>assistant\n",
    "A",  # one token
    _LONG,  # cut to 2,000 tokens by `prompt_token_ids`
]
LONG_PROMPT_TOKENS = 2000
NUM_TOKENS = 40
