"""Where the demos find their server."""

import argparse
import sys
from dataclasses import dataclass

from openai import APIStatusError, OpenAI, OpenAIError

_HINTS = {401: "; the key goes in --api-key", 404: "; most base URLs end in /v1"}


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


def count(text: str) -> int:
    """Return a number of at least 1, as a type of a flag."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def find_server(options: argparse.Namespace) -> Server:
    """Return the server that the flags name. Ends the program with a message if it is not there or refuses."""
    url = options.base_url
    try:
        with OpenAI(base_url=url, api_key=options.api_key) as client:
            models = [model.id for model in client.models.list().data]
    except APIStatusError as error:
        sys.exit(f"the server at {url} refuses: {error.message}{_HINTS.get(error.status_code, '')}")
    except OpenAIError as error:
        sys.exit(f"no server answers at {url} ({error}); start one with: make serve")
    if options.model not in [None, *models]:
        sys.exit(f"the server at {url} does not serve {options.model}; it serves {', '.join(models)}")
    return Server(url, options.api_key, options.model or models[0])
