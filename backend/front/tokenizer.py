"""Text and chat messages to token ids, and token ids back to text, one at a time."""

from collections.abc import Sequence
from pathlib import Path

from tritium.backend.front.detokenizer import Decoder, Detokenizer
from tritium.backend.front.gguf_tokenizer import load_gguf
from tritium.backend.front.tokenizer_folder import load_folder


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        path: Hugging Face directory or GGUF file.

    Attributes:
        vocab_size: One more than the highest token id.
        max_token_bytes: At least the bytes of the longest token's text.
        chat_template: A template, or templates by name; None if the model has none.
        special_tokens: Texts by role, such as bos_token.
        eos_token_ids: The tokens that end an answer, as far as the tokenizer's files say.

    Raises:
        ValueError: a file is missing, broken or not supported; names it.
    """

    def __init__(self, path: Path) -> None:
        loaded = load_gguf(path) if path.is_file() else load_folder(path)
        self._fast, self.chat_template, self.special_tokens, self.eos_token_ids = loaded
        self._decoder = Decoder(self._fast)
        added = self._fast.get_added_tokens_decoder()
        self._added = {token.content: i for i, token in added.items()}
        vocab = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_bytes = max((len(text.encode()) for text in vocab), default=1)
        self._prefix = self._added_in_front()

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the model adds to it.

        A text that starts with the tokens that are added in front does not get them twice.
        """
        token_ids = self._encode(text, add_special_tokens=True)
        length = len(self._prefix)
        if length and token_ids[length : 2 * length] == self._prefix:
            del token_ids[:length]
        return token_ids

    def encode_word(self, word: str) -> list[list[int]]:
        """Token ids of a word at the start of a text and, if they differ, after a space."""
        word = word.lstrip()
        at_start, after_space = (
            self._encode(text, add_special_tokens=False) for text in (word, f" {word}")
        )
        return [at_start] if at_start == after_space else [at_start, after_space]

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a text that has all its special tokens, as chat templates write it."""
        return self._encode(text, add_special_tokens=False)

    def special_token_id(self, text: str) -> int | None:
        """The id of the special or added token with this text; None if there is none."""
        return self._added.get(text)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` hides this token."""
        return token_id in self._decoder.special

    def to_json(self) -> str:
        """The tokenizer in the format of tokenizer.json, without the chat template."""
        return self._fast.to_str()

    def decode_token(self, token_id: int) -> str:
        """The text of a single token with its leading blank, special tokens included.

        Bytes that are no character are U+FFFD.
        """
        return self._decoder.token(token_id)

    def decode_token_after(self, context: Sequence[int], token_id: int) -> str:
        """The text of a token whose bytes alone are no character.

        Args:
            context: The tokens before it; they tell which character its bytes complete.
        """
        return self._decoder.token_after(context, token_id)

    def detokenizer(self, prompt_token_ids: list[int], skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for the answer to a prompt."""
        return Detokenizer(self._decoder, prompt_token_ids, skip_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch: `encode` holds Python's lock, 50 ms for 25 kB, and stops all streams.
        [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def _added_in_front(self) -> list[int]:
        """The tokens that are put before every text."""
        text = self._fast.encode("a", add_special_tokens=False).ids
        whole = self._fast.encode("a").ids
        starts = range(len(whole) - len(text) + 1)
        return next((whole[:i] for i in starts if text and whole[i : i + len(text)] == text), [])
