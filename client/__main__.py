"""The commands `tritium chat`, `tritium generate` and `tritium usage`."""

import argparse
import json
import os
import sys
from typing import Any

from rich.console import Console

from tritium.client.base import Client
from tritium.client.chat import HELP, Chat, run_chat
from tritium.client.grpc_client import GrpcClient
from tritium.client.http_client import HttpClient
from tritium.client.types import GenerationError, Usage
from tritium.client.usage import add_commands


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    args = build_parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except (GenerationError, TimeoutError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def build_parser() -> argparse.ArgumentParser:
    """Describe the commands and their options."""
    common = argparse.ArgumentParser(add_help=False)
    server = common.add_argument_group("server")
    server.add_argument(
        "--url",
        help="address of the server; default: localhost:8001, with --http http://localhost:8000",
    )
    server.add_argument("--http", action="store_true", help="use HTTP instead of gRPC")
    server.add_argument(
        "--model", default="smollm2", help="name of the served model; default: %(default)s"
    )
    server.add_argument("--timeout", type=float, metavar="S", help="seconds for a whole answer")
    sampling = common.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="most tokens of an answer; default: %(default)s",
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="default: 0, the most likely token each time (greedy)",
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the most likely tokens of total probability P",
    )
    sampling.add_argument(
        "--seed", type=int, metavar="N", help="makes a sampled answer reproducible"
    )
    sampling.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer before this text; may be repeated",
    )
    sampling.add_argument(
        "--param",
        action="append",
        default=[],
        type=parse_param,
        metavar="KEY=VALUE",
        help="another sampling parameter, with its value as JSON; may be repeated",
    )

    parser = argparse.ArgumentParser(prog="tritium", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    chat = commands.add_parser(
        "chat",
        parents=[common],
        help="talk to the model",
        description=f"Talk to a served model: {HELP}.",
    )
    chat.add_argument("--system", help="system prompt")
    chat.set_defaults(run=_chat)
    generate = commands.add_parser(
        "generate",
        parents=[common],
        help="print one answer",
        description="Print one answer of a served model, as it arrives.",
    )
    generate.add_argument("prompt", help="the user's message; with --raw the whole prompt")
    form = generate.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message (default)"
    )
    form.add_argument(
        "--raw", action="store_true", help="send the prompt as it is, without the chat template"
    )
    generate.add_argument("--usage", action="store_true", help="print tokens and times to stderr")
    generate.set_defaults(run=_generate)
    add_commands(commands)
    return parser


def parse_param(text: str) -> tuple[str, Any]:
    """Split KEY=VALUE; a value that is not JSON is a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def sampling_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given; --param overrides the others."""
    named = {
        name: getattr(args, name) for name in ("max_tokens", "temperature", "top_p", "seed", "stop")
    }
    return {name: value for name, value in named.items() if value is not None} | dict(args.param)


def _client(args: argparse.Namespace) -> Client:
    transport: type[GrpcClient] | type[HttpClient] = HttpClient if args.http else GrpcClient
    return transport(args.url, args.model) if args.url else transport(model=args.model)


def _chat(args: argparse.Namespace) -> int:
    chat = Chat(_client(args), sampling_parameters(args), args.system, args.timeout)
    return run_chat(chat, Console(highlight=False))


def _generate(args: argparse.Namespace) -> int:
    messages = None if args.raw else [{"role": "user", "content": args.prompt}]
    stream = _client(args).stream(
        args.prompt if args.raw else None,
        messages=messages,
        sampling=sampling_parameters(args),
        timeout=args.timeout,
    )
    usage = None
    with stream as deltas:
        for delta in deltas:
            print(delta.text, end="", flush=True)
            usage = delta.usage or usage
    print(flush=True)
    if args.usage and usage:
        print(describe_usage(usage), file=sys.stderr)
    return 0


def describe_usage(usage: Usage) -> str:
    """An answer's usage as one line of text."""
    return (
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
        f"output {usage.output_tokens} tokens; queue {usage.queue_ms:.0f} ms, "
        f"first token {usage.ttft_ms:.0f} ms, total {usage.total_ms:.0f} ms; "
        f"device {usage.prefill_ms + usage.decode_ms:.1f} ms"
        + ("" if usage.cost is None else f", cost {usage.cost:.6f}")
    )


if __name__ == "__main__":
    sys.exit(main())
