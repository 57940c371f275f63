"""Token ids back to text: an answer's stream, and single tokens."""

import json
from collections.abc import Sequence
from itertools import islice

import tokenizers

_CONTEXT = 8  # tokens that are decoded again with each new one
_BROKEN = "\ufffd"  # stands for bytes that are no character

# Byte-level tokens write a byte as the character of its number, or as one from 256 on if that
# cannot be seen.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTE_OF_SIGN = {chr(byte): byte for byte in _SEEN} | {
    chr(256 + i): byte for i, byte in enumerate(_UNSEEN)
}


class Decoder:
    """What a tokenizer's tokens look like as text."""

    def __init__(self, fast: tokenizers.Tokenizer) -> None:
        self._fast = fast
        added = fast.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.bytes: dict[int, int] = {}  # the byte of each token that is one, by byte fallback
        decoder = json.dumps(json.loads(fast.to_str())["decoder"])
        self._is_byte_level = "ByteLevel" in decoder
        if "ByteFallback" in decoder:
            for byte in range(256):
                token_id = fast.token_to_id(f"<0x{byte:02X}>")
                if token_id is not None and token_id not in added:
                    self.bytes[token_id] = byte
        # Decoders take a blank from the first token of a text: a token alone is decoded after this.
        self._first = fast.encode("a", add_special_tokens=False).ids[-1:]
        self._first_text = self.text(self._first)

    def text(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included."""
        return self._fast.decode(token_ids, skip_special_tokens=False)

    def end_within_character(self, token_ids: list[int]) -> bool:
        """Whether byte-level tokens end with the beginning of a character."""
        tokens = [self._fast.id_to_token(token_id) or "" for token_id in token_ids[-3:]]
        try:
            data = bytes(_BYTE_OF_SIGN[sign] for sign in "".join(tokens))
        except KeyError:
            return False
        return self._is_byte_level and any(_is_beginning(data[-n:]) for n in (1, 2, 3))

    def token(self, token_id: int) -> str:
        """The text of one token, with its leading blank, special or not."""
        return self.text([*self._first, token_id]).removeprefix(self._first_text)

    def token_after(self, context: Sequence[int], token_id: int) -> str:
        """The character that a token completes, with what stands beside it in its tokens; none if
        its last character is not complete. As vLLM shows tokens.

        Args:
            context: The tokens before it.
        """
        for length in range(1, min(4, len(context)) + 1):
            before = list(context[-length:])
            whole = self.text([*self._first, *before, token_id])
            if not whole.endswith(_BROKEN):
                while before and self.text([before[-1]]).endswith(_BROKEN):
                    before.pop()
                return whole.removeprefix(self.text([*self._first, *before]))
        return ""


class Detokenizer:
    """Turns token ids into text, one at a time; holds back incomplete characters.

    Args:
        decoder: The tokenizer's.
        prompt_token_ids: They tell whether the answer's first word starts with a blank.
        skip_special_tokens: Whether special tokens have no text.
    """

    def __init__(
        self, decoder: Decoder, prompt_token_ids: list[int], skip_special_tokens: bool
    ) -> None:
        self._decoder = decoder
        self._hidden = decoder.special if skip_special_tokens else frozenset()
        # The last tokens, and how much of their text was given out.
        shown = (
            token_id for token_id in reversed(prompt_token_ids) if token_id not in self._hidden
        )
        self._ids = list(islice(shown, _CONTEXT))[::-1]
        self._given = len(decoder.text(self._ids))
        self._bytes = b""  # of a character that is not complete; their tokens are in _ids

    def add(self, token_id: int) -> str:
        """The text that this token completes: usually its own, sometimes none."""
        if token_id in self._hidden:
            return ""
        byte = self._decoder.bytes.get(token_id)
        if byte is not None:
            return self._add_byte(token_id, byte)
        broken = self._release_bytes()
        self._ids.append(token_id)
        text = self._decoder.text(self._ids)
        # Of broken bytes at the end, only those of the last sign may still become a character.
        complete = len(text) - text.endswith(_BROKEN)
        new = text[self._given : complete]
        self._given = max(self._given, complete)
        if len(self._ids) > 2 * _CONTEXT:
            held = len(text) - self._given
            del self._ids[:-_CONTEXT]
            self._given = len(self._decoder.text(self._ids)) - held
        return broken + new

    def finish(self) -> str:
        """The text that was held back. Nothing may be added after it.

        A character of byte-level tokens that the answer's end cuts off is left out, as in vLLM:
        most answers that end there ended by their length.
        """
        if self._decoder.end_within_character(self._ids):
            return ""
        return self._release_bytes() + self._release_text()

    def _add_byte(self, token_id: int, byte: int) -> str:
        given = self._release_text()
        self._ids = [*self._ids[-_CONTEXT:], token_id]
        for data in (self._bytes + bytes([byte]), bytes([byte])):
            if _is_beginning(data):
                self._bytes = data
                return given
            try:
                text = data.decode()
            except UnicodeDecodeError:
                given += _BROKEN * len(self._bytes)
                self._bytes = b""
            else:
                self._bytes = b""
                return given + text
        return given + _BROKEN

    def _release_bytes(self) -> str:
        """Bytes that a token of another kind ended."""
        text, self._bytes = _BROKEN * len(self._bytes), b""
        if self._ids and self._ids[-1] in self._decoder.bytes:
            self._given = len(self._decoder.text(self._ids))
        return text

    def _release_text(self) -> str:
        """Broken bytes at the end of a token that is no byte."""
        if self._ids and self._ids[-1] in self._decoder.bytes:
            return ""
        text = self._decoder.text(self._ids)
        held, self._given = text[self._given :], max(self._given, len(text))
        return held


def _is_beginning(data: bytes) -> bool:
    """Whether bytes are the beginning of a character, and not all of it."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False
