"""Text and chat messages to token ids, and token ids back to text, one at a time."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tritium.backend.errors import InvalidArgument
from tritium.backend.front.chat_template import ChatOptions, ChatTemplate
from tritium.backend.front.detokenizer import Decoder, Detokenizer
from tritium.backend.front.gguf_tokenizer import load_gguf
from tritium.backend.front.tokenizer_folder import load_folder

_MARK = "ANSWER"  # stands for an answer in a rendered conversation


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        path: Hugging Face directory or GGUF file.

    Attributes:
        vocab_size: One more than the highest token id.
        chat_template: A template, or templates by name; None if the model has none.
        chat: Renders by it.
        special_tokens: Texts by role, such as bos_token.
        eos_token_ids: The tokens that end an answer, as far as the tokenizer's files say.

    Raises:
        ValueError: a file is missing, broken or not supported; names it.
    """

    def __init__(self, path: Path) -> None:
        loaded = load_gguf(path) if path.is_file() else load_folder(path)
        self._fast, self.chat_template, self.special_tokens, self.eos_token_ids = loaded
        self.chat: ChatTemplate | None = None
        if self.chat_template:
            self.chat = ChatTemplate(self.chat_template, self.special_tokens)
        self._decoder = Decoder(self._fast)
        added = self._fast.get_added_tokens_decoder()
        self._added = {token.content: i for i, token in added.items()}
        self._special = {token.content: i for i, token in added.items() if token.special}
        self.vocab_size = max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._prefix = self._added_in_front()

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the model adds to it.

        A text that starts with the tokens that are added in front does not get them twice.
        """
        token_ids = self._fast.encode(text).ids
        length = len(self._prefix)
        if length and token_ids[length : 2 * length] == self._prefix:
            del token_ids[:length]
        return token_ids

    def encode_word(self, word: str) -> list[list[int]]:
        """Token ids of a word at the start of a text and, if they differ, after a space."""
        word = word.lstrip()
        at_start, after_space = (
            self._fast.encode(text, add_special_tokens=False).ids for text in (word, f" {word}")
        )
        return [at_start] if at_start == after_space else [at_start, after_space]

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: ChatOptions | None = None,
    ) -> list[int]:
        """Token ids of a conversation by the model's chat template, ready for the answer.

        Args:
            messages: At least one.
            tools: Tools that the model may call.
            options: How they are rendered.

        Raises:
            InvalidArgument: the model has no chat template, or the template rejects these
                messages or ignores tools.
        """
        if not self.chat:
            raise InvalidArgument("messages: this model has no chat template; send text_input")
        text = self.chat.render(messages, tools, options)
        try:
            return self._fast.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise InvalidArgument("messages: has a lone surrogate, which is no character") from None

    def all_eos_token_ids(self, of_model: Iterable[int], vocab_size: int) -> tuple[int, ...]:
        """The tokens that end an answer: the model's, the tokenizer's, the chat template's.

        Args:
            of_model: By its config and generation config.
            vocab_size: Of the model; it never generates other tokens.
        """
        ids = (*of_model, *self.eos_token_ids, *self._end_of_turn_ids())
        return tuple(dict.fromkeys(i for i in ids if i < vocab_size))

    def _end_of_turn_ids(self) -> list[int]:
        """The special token with which the chat template ends the assistant's turn, if any."""
        if not self.chat:
            return []
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self.chat.render(turns, options=ChatOptions(False))
        except InvalidArgument:  # a template for other conversations
            return []
        rest = text.partition(_MARK)[2].lstrip()
        ends = [token for token in self._special if rest.startswith(token)]
        return [self._special[max(ends, key=len)]] if ends else []

    def special_token_id(self, text: str) -> int | None:
        """The id of the special or added token with this text; None if there is none."""
        return self._added.get(text)

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

    def detokenizer(
        self,
        prompt_token_ids: list[int],
        skip_special_tokens: bool,
        shown: Collection[int] = (),
    ) -> Detokenizer:
        """A detokenizer for the answer to a prompt.

        Args:
            shown: Special tokens that have a text even if special tokens are skipped.
        """
        return Detokenizer(self._decoder, prompt_token_ids, skip_special_tokens, shown)

    def _added_in_front(self) -> list[int]:
        """The tokens that are put before every text."""
        text = self._fast.encode("a", add_special_tokens=False).ids
        whole = self._fast.encode("a").ids
        starts = range(len(whole) - len(text) + 1)
        return next((whole[:i] for i in starts if text and whole[i : i + len(text)] == text), [])
