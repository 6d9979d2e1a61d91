"""Where the demos find their server."""

import argparse
import sys
from dataclasses import dataclass

from openai import APIConnectionError, OpenAI, OpenAIError


@dataclass(frozen=True, slots=True)
class Server:
    """An OpenAI-compatible server and the model that it serves."""

    base_url: str
    api_key: str
    model: str

    def client(self) -> OpenAI:
        """Return a client of the server."""
        return OpenAI(base_url=self.base_url, api_key=self.api_key)


def server_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that all demos have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    parser.add_argument("--api-key", default="none", help="key of the server, if it wants one")
    parser.add_argument("--model", help="default: the first that the server lists")
    return parser


def positive(text: str) -> int:
    """Read a flag whose value is at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def find_server(options: argparse.Namespace) -> Server:
    """Return the server that the flags name. Ends the program with a message if there is none."""
    try:
        with OpenAI(base_url=options.base_url, api_key=options.api_key) as client:
            models = [model.id for model in client.models.list().data]
    except APIConnectionError as error:
        sys.exit(f"no server answers at {options.base_url} ({error}); start one with: make serve")
    except OpenAIError as error:
        sys.exit(f"the server at {options.base_url} does not name its models: {error}")
    if options.model not in [None, *models]:
        sys.exit(f"the server at {options.base_url} does not serve {options.model}; it serves {', '.join(models)}")
    return Server(options.base_url, options.api_key, options.model or models[0])
