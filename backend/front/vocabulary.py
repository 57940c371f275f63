"""The model's vocabulary: which token ids exist, and which of them end an answer."""

from collections.abc import Iterable

from tritium.backend.errors import InvalidArgument
from tritium.backend.front.chat_template import after_answer, inside_answer
from tritium.backend.front.tokenizer import Tokenizer


class Vocabulary:
    """The tokens that the model has: as many as its embedding has rows, and as there are logits.

    A tokenizer may know more tokens, which the model can't read, or fewer.

    Args:
        tokenizer: The model's tokenizer.
        size: Rows of the model's embedding.
        eos_token_ids: Those of the model's configuration.

    Attributes:
        eos_token_ids: Tokens that end an answer: those of the configuration, of the tokenizer, and
            the special token that the chat template writes after an answer.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.size = size
        found = [*eos_token_ids, *tokenizer.eos_token_ids, *self._end_of_turn()]
        self.eos_token_ids = tuple(i for i in dict.fromkeys(found) if 0 <= i < size)

    def check(self, field: str, token_ids: Iterable[int]) -> None:
        """Check that the model has these tokens.

        Args:
            field: Where they come from, for the error.

        Raises:
            InvalidArgument: names the field, the token and the vocabulary's size.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self.size:
                raise InvalidArgument(
                    f"{field}: {self._describe(token_id)} is not allowed; the model's vocabulary "
                    f"has {self.size} tokens, with the ids 0 to {self.size - 1}"
                )

    def _describe(self, token_id: int) -> str:
        if 0 <= token_id < self._tokenizer.vocab_size:
            return f"the token {self._tokenizer.decode_token(token_id)!r:.100} (id {token_id})"
        return f"the token id {token_id!s:.100}"

    def _end_of_turn(self) -> list[int]:
        tokenizer = self._tokenizer
        template = tokenizer.chat_template, tokenizer.special_tokens
        first = tokenizer.encode_rendered(after_answer(*template).lstrip())[:1]
        inside = inside_answer(*template)  # a token that also stands there does not end an answer
        return [
            token_id
            for token_id in first
            if tokenizer.is_special(token_id) and tokenizer.decode_token(token_id) not in inside
        ]
