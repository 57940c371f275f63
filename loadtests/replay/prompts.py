"""Prompts of exact lengths, made of words; equal hash ids become equal tokens."""

import random
from functools import lru_cache
from typing import Protocol

import tokenizers

from tritium.loadtests.replay.plan import Planned


class Vocabulary(Protocol):
    """The part of a tokenizer that prompts need."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode_token(self, token_id: int) -> str: ...


class JsonVocabulary:
    """The vocabulary of a tokenizer.json; client processes need no torch for it."""

    def __init__(self, text: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode_token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


class Prompts:
    """Writes prompts from words that are one token each.

    Args:
        tokenizer: Tokenizer of the served model.
        seed: Another seed gives other words, so that a run does not find the prompts of an earlier
            run in the server's prefix cache.
    """

    def __init__(self, tokenizer: Vocabulary, seed: str) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._num_special = len(tokenizer.encode(""))  # tokens that the model adds around a prompt
        candidates = (tokenizer.decode_token(i) for i in range(min(tokenizer.vocab_size, 20_000)))
        self._words = [
            word
            for word in dict.fromkeys(candidates)
            if word.startswith(" ") and word[1:].isascii() and word[1:].isalpha()
        ]
        if len(self._words) < 100:
            raise ValueError(f"the vocabulary has only {len(self._words)} plain words")
        self._block = lru_cache(maxsize=8192)(self._draw)

    def write(self, request: Planned) -> str:
        """The text of a request's prompt.

        Raises:
            ValueError: the text does not have the planned number of tokens.
        """
        num_words = max(request.input_length - self._num_special, 1)
        words: list[str] = []
        for hash_id in request.hash_ids:
            words += self._block(f"block {hash_id}", request.block_size)
            if len(words) >= num_words:
                break
        if len(words) < num_words:  # without hash ids: shared with no other prompt
            words += self._draw(f"request {request.index}", num_words - len(words))
        text = "".join(words[:num_words])
        num_tokens = len(self._tokenizer.encode(text))
        if num_tokens != num_words + self._num_special:
            raise ValueError(
                f"request {request.index}: the prompt has {num_tokens} tokens instead of "
                f"{num_words + self._num_special}; this tokenizer merges words"
            )
        return text

    def _draw(self, name: str, num_words: int) -> list[str]:
        return random.Random(f"{self._seed}/{name}").choices(self._words, k=num_words)
