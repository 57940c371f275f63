"""Speculative decoding by prompt lookup: guesses of a sequence's next tokens, without a model.

Where a text repeats itself (quotes, code, edits of the prompt), the tokens that followed the last
few tokens before are likely to follow them again. A step computes such draft tokens along with the
sequence's own and keeps those that it would have sampled anyway. So a draft changes only how fast
an answer is generated (`Scheduler.update`).
"""

from itertools import count

from tritium.backend.config import SpeculativeConfig

_FIRST_LENGTH = 3  # tokens of a draft
_LONGEST_PAUSE = 32  # tokens


class NgramProposer:
    """Drafts for one sequence (prompt lookup decoding; Saxena, 2023; vLLM's method "ngram").

    An index of all n-grams so far makes the time of a look-up independent of the length. Drafts
    grow as they succeed, shrink as they fail, and pause after one that fails entirely, twice as
    long each time. So a text that does not repeat itself costs little.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> its last occurrence's end
        self._num_indexed = 0  # leading tokens whose n-grams are in `_ends`
        self._length = min(_FIRST_LENGTH, config.num_speculative_tokens)  # of the next draft
        self._pause = 1  # tokens to pause after the next draft that fails
        self._resumes_at = 0  # length of the sequence at which the pause ends

    def is_paused(self, num_tokens: int) -> bool:
        """Whether drafts pause at this length of the sequence."""
        return num_tokens < self._resumes_at

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """Up to `limit` tokens that may follow; [] if the last tokens did not occur before."""
        if self.is_paused(len(token_ids)):
            return []
        self._index(token_ids)
        for size in self._sizes:
            end = self._ends.get(tuple(token_ids[-size:]))
            if end:
                return self._continue(token_ids, end, min(limit, self._length))
        return []

    def observe(self, num_tokens: int, num_accepted_tokens: int) -> None:
        """Learn how much of a draft was accepted; `num_tokens` is the sequence's new length."""
        self._length = min(2 * num_accepted_tokens + 1, self._config.num_speculative_tokens)
        if num_accepted_tokens:
            self._pause = 1
        else:
            self._resumes_at = num_tokens + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _index(self, token_ids: list[int]) -> None:
        """Index all n-grams that are followed by a token; the last ones are looked up."""
        known = len(token_ids) - 1
        for size in self._sizes:
            start = max(self._num_indexed + 1 - size, 0)
            ngrams = zip(*(token_ids[start + i : known] for i in range(size)), strict=False)
            self._ends.update(zip(ngrams, count(start + size), strict=False))
        self._num_indexed = max(self._num_indexed, known)

    def _continue(self, token_ids: list[int], start: int, length: int) -> list[int]:
        """The tokens from `start` on; beyond the end, the draft repeats itself."""
        period = len(token_ids) - start
        known = token_ids[start : start + length]
        return [known[i % period] for i in range(length)]
