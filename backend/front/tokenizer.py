"""Text and chat messages to token ids, and token ids back to text, one at a time."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import transformers
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from tritium.backend.errors import InvalidArgument

# Prompt tokens that tell the decoder whether the answer's first word starts with a space.
_PROMPT_TAIL = 8


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        path: Hugging Face directory or GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self._hf = _from_gguf(path) if path.is_file() else AutoTokenizer.from_pretrained(path)
        self._fast = self._hf.backend_tokenizer
        self.vocab_size = len(self._hf)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the model adds to it."""
        return self._fast.encode(text).ids

    def encode_word(self, word: str) -> list[list[int]]:
        """Token ids of a word at the start of a text and, if they differ, after a space."""
        word = word.lstrip()
        at_start, after_space = (
            self._fast.encode(text, add_special_tokens=False).ids for text in (word, f" {word}")
        )
        return [at_start] if at_start == after_space else [at_start, after_space]

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation by the model's chat template, ready for the answer.

        Args:
            messages: At least one.
            tools: Tools that the model may call.

        Raises:
            InvalidArgument: the model has no chat template, or the template rejects these
                messages or ignores tools.
        """
        if not self._hf.chat_template:
            raise InvalidArgument("messages: this model has no chat template; send text_input")
        try:
            text = self._render(messages, tools)
            if tools and text == self._render(messages, None):
                raise InvalidArgument("tools: this model's chat template does not support them")
            return self._fast.encode(text, add_special_tokens=False).ids
        except InvalidArgument:
            raise
        except Exception as error:  # noqa: BLE001 -- a template may raise anything
            raise InvalidArgument(f"messages: the chat template refuses them: {error}") from None

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        text = self._hf.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    def to_json(self) -> str:
        """The tokenizer in the format of tokenizer.json, without the chat template."""
        return self._fast.to_str()

    def decode_token(self, token_id: int) -> str:
        """The text of a single token, special tokens included."""
        return self._fast.decode([token_id], skip_special_tokens=False)

    def detokenizer(self, prompt_token_ids: list[int], skip_special_tokens: bool) -> "Detokenizer":
        """A detokenizer for the answer to a prompt."""
        return Detokenizer(self._fast, prompt_token_ids, skip_special_tokens)


def _from_gguf(path: Path) -> Any:
    """Cached on disk: transformers needs seconds to build a tokenizer from a GGUF file."""
    stat = path.stat()
    identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {transformers.__version__}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tritium"
    cached = folder / f"tokenizer-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if os.path.isdir(cached):  # False if there is no permission to look
        return AutoTokenizer.from_pretrained(cached)
    made = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    with contextlib.suppress(OSError):  # the folder is not writable, or another process was faster
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            made.save_pretrained(f"{unfinished}/tokenizer")
            os.rename(f"{unfinished}/tokenizer", cached)
    return made


class Detokenizer:
    """Turns token ids into text, one at a time; holds back incomplete characters."""

    def __init__(
        self, tokenizer: Any, prompt_token_ids: list[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        tail = prompt_token_ids[-_PROMPT_TAIL:]
        if tokenizer.decode(tail).endswith("\ufffd"):  # incomplete: the answer would repeat it
            tail = []
        self._stream = DecodeStream(ids=tail, skip_special_tokens=skip_special_tokens)

    def add(self, token_id: int) -> str:
        """The text that this token completes: usually its own, sometimes none."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # noqa: BLE001 -- bytes that are not text; continue after them
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._tokenizer, token_id) or ""
