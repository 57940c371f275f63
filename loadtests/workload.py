"""The requests of a load test: a seeded mix of prompt lengths and answer lengths."""

import random
from typing import Any, NamedTuple

# Common words, each about one token of any vocabulary.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "it", "for", "was", "on", "are", "as", "with"),
    *("time", "people", "water", "house", "day", "look", "make", "write", "long", "two", "most"),
)
_PROMPT_WORDS = ((16, 5), (64, 3), (256, 1))  # (length, weight)
_MAX_TOKENS = ((8, 3), (32, 4), (96, 1))


class LoadRequest(NamedTuple):
    """A prompt and the sampling parameters that force the length of its answer."""

    prompt: str
    sampling: dict[str, Any]


class Workload:
    """An endless sequence of requests; the same seed gives the same sequence."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def next_request(self) -> LoadRequest:
        """Draw one request."""
        prompt = " ".join(self._random.choices(_WORDS, k=self._draw(_PROMPT_WORDS)))
        sampling = {
            "max_tokens": self._draw(_MAX_TOKENS),
            "ignore_eos": True,
            "seed": self._random.getrandbits(31),
        }
        return LoadRequest(prompt, sampling)

    def _draw(self, choices: tuple[tuple[int, int], ...]) -> int:
        lengths = [length for length, _ in choices]
        return self._random.choices(lengths, [weight for _, weight in choices])[0]
