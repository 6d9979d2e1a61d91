"""The command `radixserve`."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from radixserve.bench.workloads import WORKLOADS
from radixserve.cli.cache_options import add_cache_arguments
from radixserve.cli.options import (
    ENVIRONMENT_HELP,
    GROUPS,
    ArgumentParser,
    Group,
    add_config_arguments,
    engine_config,
)
from radixserve.errors import ConfigError, RadixServeError
from radixserve.version import __version__

DESCRIPTION = "An LLM serving engine for agents: every shared prompt prefix is computed once."
EXAMPLES = """\
examples:
  radixserve serve                              the demo model on http://127.0.0.1:8000/v1
  radixserve serve ./Qwen3-0.6B --port 9000     a Hugging Face directory
  radixserve serve model.gguf --api-key SECRET  a GGUF file, behind a key
  radixserve chat                               talk to the demo model, no server needed
  radixserve cache stats --watch                follow the cache of a running server
  radixserve bench serve --workload agents      measure a running server
  radixserve bench replay TRACE --capacity-tokens 1000000
                                                what a cache of that size makes of recorded requests"""
DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"
DEFAULT_TEMPERATURE = 0.7
EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
SERVE_GROUPS: tuple[Group, ...] = ("model", "cache", "scheduling", "server", "events")
CHAT_GROUPS: tuple[Group, ...] = ("model", "cache")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for wrong settings, 1 for another failure, each with one line."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else list(argv), os.environ)
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        return _fail(error, EXIT_CONFIG)
    except RadixServeError as error:
        return _fail(error, EXIT_FAILURE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone, as `head` does. What is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _fail(error: RadixServeError, exit_code: int) -> int:
    print(f"radixserve: error: {' '.join(str(error).split())}", file=sys.stderr)
    return exit_code


def _run(argv: list[str], environment: Mapping[str, str]) -> int:
    parser = _make_parser()
    if not argv:
        parser.print_help()
        return 0
    arguments = parser.parse_args(argv)
    # A command's module is imported when it is chosen, so that --help and mistakes are answered at once.
    match arguments.command:
        case "serve":
            from radixserve.cli.serve import run as run_serve  # noqa: PLC0415

            return run_serve(engine_config(arguments, environment, SERVE_GROUPS))
        case "chat":
            from radixserve.cli.chat import run as run_chat  # noqa: PLC0415

            _check_chat_arguments(arguments)
            is_remote = arguments.base_url is not None
            return run_chat(arguments, None if is_remote else engine_config(arguments, environment, CHAT_GROUPS))
        case "cache":
            from radixserve.cli.cache import run as run_cache  # noqa: PLC0415

            return run_cache(arguments)
        case "bench" if arguments.benchmark == "replay":
            from radixserve.cli.replay import run as run_replay  # noqa: PLC0415

            return run_replay(arguments)
        case _:
            from radixserve.cli.bench import run as run_bench  # noqa: PLC0415

            return run_bench(arguments)


def _make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="radixserve", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"radixserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    serve = commands.add_parser(
        "serve",
        usage="%(prog)s [MODEL] [FLAGS]",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, by OpenAI's API.",
        epilog=ENVIRONMENT_HELP,
    )
    add_config_arguments(serve, SERVE_GROUPS)
    _add_chat_arguments(
        commands.add_parser(
            "chat",
            usage="%(prog)s [MODEL] [FLAGS]\n       %(prog)s --base-url URL [FLAGS]",
            help="talk to a model in the terminal",
            description="Talk to a model in the terminal: to one loaded here, or with --base-url to a server's. "
            "A line is a message; /help in the chat lists its commands. Lines piped in are answered one by one.",
        )
    )
    add_cache_arguments(
        commands.add_parser(
            "cache",
            help="look at a running server's cache, and change it",
            description="Look at the cache of a running server, and change it.",
        ),
        DEFAULT_BASE_URL,
    )
    bench = commands.add_parser(
        "bench", help="measure a server or the cache", description="Measure a server, or the cache."
    )
    benchmarks = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True, title="benchmarks")
    _add_bench_arguments(
        benchmarks.add_parser(
            "serve",
            usage="%(prog)s --workload NAME [FLAGS]",
            help="a workload against any OpenAI-compatible server",
            description="Run a workload against any OpenAI-compatible server; report time to first token, "
            "inter-token latency, throughput and cached tokens. Ends with 1 if a request failed.",
        )
    )
    _add_replay_arguments(
        benchmarks.add_parser(
            "replay",
            usage="%(prog)s TRACE --capacity-tokens N [N ...] [FLAGS]",
            help="recorded requests through the cache, without a model",
            description="Run the requests of a trace through the cache, one at a time and without a model; report the "
            "share of input tokens that it finds, and what the best eviction that knows the future would find.",
        )
    )
    return parser


def _add_chat_arguments(parser: ArgumentParser) -> None:
    add_config_arguments(parser, CHAT_GROUPS)
    answers = parser.add_argument_group("answers")
    answers.add_argument("--system", metavar="TEXT", help="system prompt")
    answers.add_argument("--max-tokens", metavar="N", type=_positive, help="most tokens of an answer")
    answers.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=DEFAULT_TEMPERATURE,
        help="randomness; 0 takes the most likely token each time (default: %(default)s)",
    )
    server = parser.add_argument_group("server, instead of a model loaded here")
    server.add_argument("--base-url", metavar="URL", help=f"server to talk to, such as {DEFAULT_BASE_URL}")
    _add_server_arguments(server.add_argument)


def _add_bench_arguments(parser: ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", metavar="URL", default=DEFAULT_BASE_URL, help="server to measure (default: %(default)s)"
    )
    _add_server_arguments(server.add_argument)
    workload = parser.add_argument_group("workload")
    purposes = "; ".join(f"{name}: {workload.purpose.replace(': ', ', ')}" for name, workload in WORKLOADS.items())
    workload.add_argument("--workload", choices=WORKLOADS, metavar="|".join(WORKLOADS), required=True, help=purposes)
    workload.add_argument(
        "--repeat", metavar="N", type=_positive, default=1, help="runs, each with prompts of its own (default: 1)"
    )
    workload.add_argument(
        "--seed", metavar="N", type=int, help="source of the prompts; left out: drawn anew and reported"
    )
    workload.add_argument(
        "--same-prompts", action="store_true", help="send the same prompts in each repeat, to measure a warm cache"
    )
    workload.add_argument("--json", metavar="FILE", type=Path, help="write all figures and requests there as JSON")


def _add_replay_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="file, plain or gzipped: Mooncake's requests or coding-agent sessions (one JSON object a line), or "
        "tau-bench's trajectories (a JSON list), for which the demo model's tokenizer is used",
    )
    parser.add_argument(
        "--capacity-tokens",
        metavar="N",
        type=_positive,
        nargs="+",
        required=True,
        help="tokens that the cache holds; with several numbers, one replay for each",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        nargs="+",
        help="order of eviction, learned-reuse or lru (default: a server's); with several names, one replay for each",
    )
    parser.add_argument(
        "--sessions",
        metavar="N",
        type=_positive,
        help="sessions that go on side by side, where the trace has sessions (default: 32)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each replay")


def _add_server_arguments(add: Callable[..., argparse.Action]) -> None:
    add("--model", metavar="NAME", help="the model's id there; left out: the first one that the server lists")
    add("--api-key", metavar="KEY", help="key to send")


def _check_chat_arguments(arguments: argparse.Namespace) -> None:
    fields = ("model_path", *(name for group in CHAT_GROUPS for name in GROUPS[group]))
    local = [name for name in fields if getattr(arguments, name) is not None]
    if arguments.base_url is not None and local:
        name = "MODEL" if local[0] == "model_path" else "--" + local[0].replace("_", "-")
        raise ConfigError(f"{name} is for a model loaded here; with --base-url give the server's --model, or nothing")
    for name in ("model", "api_key"):
        if arguments.base_url is None and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for a server; give its --base-url too")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value
