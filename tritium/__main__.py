"""The command `tritium`: finds what a command line names, and imports only that."""

import importlib
import sys
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Command(NamedTuple):
    """A function `main(arguments)` that returns an exit code or None."""

    module: str
    summary: str
    passes_name: bool = False  # whether the command's name is the first of the arguments


class Group(NamedTuple):
    summary: str
    commands: dict[str, Command]


CLIENT, LOADTESTS = "tritium.client.__main__", "tritium.loadtests.__main__"

COMMANDS: dict[str, Command | Group] = {
    "serve": Command("tritium.backend.host.serve", "start Triton Server with a model repository"),
    "chat": Command(CLIENT, "talk to a served model in the terminal", passes_name=True),
    "generate": Command(CLIENT, "print one answer of a served model", passes_name=True),
    "usage": Command(CLIENT, "bills from the files of a ledger", passes_name=True),
    "loadtest": Group(
        "traces of real traffic, their replay, and load of all kinds",
        {
            "convert": Command(LOADTESTS, "make a trace of another format's file", True),
            "describe": Command(LOADTESTS, "rates, lengths and prefix hits of a trace", True),
            "synthesize": Command(LOADTESTS, "make a trace with given statistics", True),
            "replay": Command(LOADTESTS, "replay a trace against a server, and report", True),
            "compare": Command(LOADTESTS, "put replays side by side", True),
            "bench": Command("tritium.loadtests.bench", "engine, server, static batching"),
            "bill": Command("tritium.loadtests.bill", "whether equal traffic has equal bills"),
            "curve": Command("tritium.loadtests.curve", "draw tokens/s against concurrency"),
            "front": Command("tritium.loadtests.front", "token rate through Triton Server"),
            "gains": Command("tritium.loadtests.gains", "what batching and paging gain"),
            "overlap": Command(
                "tritium.loadtests.overlap", "prefix reuse of a trace by cache size"
            ),
            "peers": Command("tritium.loadtests.peers.__main__", "vLLM, OpenVINO, llama.cpp"),
            "prefix": Command("tritium.loadtests.prefix", "what prefix reuse gains and costs"),
            "pressure": Command("tritium.loadtests.pressure", "bursts, classes, a small cache"),
            "roundtrip": Command("tritium.loadtests.roundtrip", "capture, replay, capture again"),
            "soak": Command("tritium.loadtests.soak", "10,000 requests of all kinds"),
            "tune": Command("tritium.loadtests.tune", "which limits suit a trace"),
        },
    ),
    "benchmark": Group(
        "single parts: kernels, steps, the bill",
        {
            "aot": Command("tritium.kernels.cuda.aot", "compile all kernels without a GPU"),
            "bill-cost": Command("tritium.benchmarks.bill_cost", "cost of the bill per step"),
            "capture": Command("tritium.benchmarks.capture", "cost of a capture per request"),
            "cpu-steps": Command("tritium.benchmarks.cpu_steps", "cost of a step on CPU"),
            "gpu-check": Command("tritium.benchmarks.gpu_check", "all kernels and models on a GPU"),
            "pages": Command("tritium.benchmarks.pages", "the generated tables of docs/"),
            "prefix-cost": Command("tritium.benchmarks.prefix_cost", "cost of prefix look-ups"),
            "quality": Command("tritium.benchmarks.quality", "int8 and int4 weights: answers"),
            "roofline": Command("tritium.benchmarks.roofline", "least time of each operation"),
            "speculative": Command("tritium.benchmarks.speculative", "gain and cost of drafts"),
        },
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return _run("tritium", COMMANDS, sys.argv[1:] if arguments is None else arguments)


def _run(program: str, commands: dict[str, Command | Group], arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(_help(program, commands))
        return 0
    if name == "--version" and commands is COMMANDS:
        print(f"tritium {_version()}")
        return 0
    command = commands.get(name)
    if command is None:
        near = "".join(
            f" (did you mean '{match}'?)" for match in get_close_matches(name, commands, 1)
        )
        print(f"{program}: unknown command '{name}'{near}. See {program} --help", file=sys.stderr)
        return 2
    if isinstance(command, Group):
        return _run(f"{program} {name}", {**command.commands}, rest)
    run = importlib.import_module(command.module).main
    return run([name, *rest] if command.passes_name else rest) or 0


def _help(program: str, commands: dict[str, Command | Group]) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in commands.items()]
    return "\n".join(
        [f"usage: {program} COMMAND ...", "", *lines, "", f"{program} COMMAND --help says more."]
    )


def _version() -> str:
    try:
        return version("tritium")
    except PackageNotFoundError:
        return "(source tree, not installed)"


if __name__ == "__main__":
    sys.exit(main())
