"""The command `tritium chat`: a conversation, and the loop that reads and prints it."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from tritium.client.base import Client
from tritium.client.types import GenerationError

HELP = "/reset forgets the conversation; /quit or Ctrl-D leaves; Ctrl-C stops an answer"


class Chat:
    """The history of a conversation. Knows nothing of the screen."""

    def __init__(
        self,
        client: Client,
        sampling: dict[str, Any],
        system: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._system = [{"role": "system", "content": system}] if system else []
        self._timeout = timeout
        self.turns: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget everything except the system prompt."""
        self.turns.clear()

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces. If closed early, the history keeps the pieces so far."""
        while True:
            try:
                yield from self._answer({"role": "user", "content": text})
                return
            except GenerationError as error:
                if not self.turns or "max_model_len" not in error.message:
                    raise
                del self.turns[:2]  # too long: forget the oldest question and its answer

    def _answer(self, question: dict[str, str]) -> Iterator[str]:
        answer = ""
        messages = [*self._system, *self.turns, question]
        with self._client.stream(
            messages=messages, sampling=self._sampling, timeout=self._timeout
        ) as deltas:
            try:
                for delta in deltas:
                    answer += delta.text
                    yield delta.text
            finally:
                if answer:
                    self.turns += [question, {"role": "assistant", "content": answer}]


def run_chat(chat: Chat, console: Console) -> int:
    """Read lines and answer them until the input ends; return the exit code."""
    interactive = sys.stdin.isatty()
    if interactive:
        # Line editing and history of input(); not on every platform.
        with suppress(ImportError):
            import readline  # noqa: F401
        console.print(HELP, style="dim")
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            console.print(f"\n{HELP}", style="dim")
            continue
        if text == "/quit":
            return 0
        if text == "/reset":
            chat.reset()
        elif text:
            try:
                _show(chat.ask(text), console)
            except (GenerationError, TimeoutError) as error:
                if not interactive:
                    raise
                console.print(f"error: {error}", style="red", markup=False)


def _show(pieces: Iterator[str], console: Console) -> None:
    try:
        if console.is_terminal:
            answer = ""
            with Live(console=console) as live:
                for piece in pieces:
                    answer += piece
                    live.update(Markdown(answer))
        else:
            for piece in pieces:
                console.out(piece, end="")
            console.out()
    except KeyboardInterrupt:
        console.print("(stopped)", style="dim")
