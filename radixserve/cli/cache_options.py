"""The arguments of `radixserve cache`."""

import argparse

from radixserve.config import parse_seconds
from radixserve.errors import ConfigError

_FILE_HELP = "request body as JSON, as a chat or completion takes it; - reads it from standard input"


def add_cache_arguments(parser: argparse.ArgumentParser, default_base_url: str) -> None:
    """Add the commands that look at a running server's cache and change it."""
    commands = parser.add_subparsers(dest="cache_command", metavar="COMMAND", required=True, title="commands")
    stats = commands.add_parser("stats", help="blocks, hits, tiers and pins", description="Blocks, hits, tiers, pins.")
    stats.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=_interval,
        const=1.0,
        help="show them anew so often (1 unless given), with rates, until Ctrl-C",
    )
    tree = commands.add_parser(
        "tree",
        help="what is cached, as a tree",
        description="What is cached, as a tree of shared prefixes: the beginning of each text, who uses it, its age. "
        "The server must run with --enable-cache-introspection.",
    )
    tree.add_argument(
        "--depth", metavar="N", type=_positive, help="show so many levels (default: as many as the lines have room for)"
    )
    tree.add_argument("--max-nodes", metavar="N", type=_positive, help="show so many nodes (default: the server's)")
    explain = commands.add_parser(
        "explain",
        help="why a prompt misses",
        description="Say what a prompt would hit in the cache now, and why not more.",
    )
    explain.add_argument("file", metavar="FILE", help=_FILE_HELP)
    pin = commands.add_parser(
        "pin", help="keep a prompt cached", description="Compute a prompt and keep it cached for a time."
    )
    pin.add_argument("file", metavar="FILE", help=_FILE_HELP)
    pin.add_argument(
        "--ttl",
        metavar="TIME",
        type=seconds_of,
        help="how long: seconds, or a number with s, m or h (default: what FILE says, else 5m)",
    )
    unpin = commands.add_parser("unpin", help="end a pin", description="End a pin before its time.")
    unpin.add_argument("pin_id", metavar="ID", help="what `radixserve cache pin` printed")
    reset = commands.add_parser(
        "reset",
        help="drop what is cached",
        description="Drop all that is cached and no running request holds; with a key of a tenant, the tenant's.",
    )
    save = commands.add_parser(
        "save", help="write the cache to the disk", description="Write the cache to the server's --kv-cache-dir."
    )
    for command in (stats, tree, explain, pin, unpin, reset, save):
        add_server_arguments(command, default_base_url)


def add_server_arguments(parser: argparse.ArgumentParser, default_base_url: str) -> None:
    """Add which server is asked, with which key, and in what form the answer is printed."""
    parser.add_argument("--json", action="store_true", help="print the server's answer as one line of JSON")
    parser.add_argument(
        "--base-url", metavar="URL", default=default_base_url, help="server to ask (default: %(default)s)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="key to send")


def seconds_of(text: str) -> float:
    """Return the seconds in 90, 90s, 5m or 1h. Raises ArgumentTypeError if it is no time above 0."""
    try:
        seconds = parse_seconds(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is no time at all; give one above 0")
    return seconds


def _interval(text: str) -> float:
    seconds = seconds_of(text)
    if seconds < 0.1:
        raise argparse.ArgumentTypeError(f"{text!r} is below 0.1 seconds")
    return seconds


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)
