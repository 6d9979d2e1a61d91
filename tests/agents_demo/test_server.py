"""How a demo finds its server."""

from collections.abc import Iterator

import pytest

from agents_demo.server import find_server, server_arguments
from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.agents_demo.running import address_without_a_server
from tests.api.serving import alphabet
from tests.background import served_in_background
from tests.stub_engine import stub_engine


@pytest.fixture
def base_url(tokenizer: Tokenizer) -> Iterator[str]:
    config = EngineConfig(api_key=("secret",), served_model_name="letters")
    with served_in_background(stub_engine(tokenizer, alphabet, config=config)) as url:
        yield url


def test_the_model_is_the_one_that_is_served(base_url: str) -> None:
    options = server_arguments("").parse_args(["--base-url", base_url, "--api-key", "secret"])
    assert find_server(options).model == "letters"


def test_a_model_that_is_not_served_is_told_with_those_that_are(base_url: str) -> None:
    flags = ["--base-url", base_url, "--api-key", "secret", "--model"]
    assert find_server(server_arguments("").parse_args([*flags, "letters"])).model == "letters"
    with pytest.raises(SystemExit, match="does not serve digits; it serves letters"):
        find_server(server_arguments("").parse_args([*flags, "digits"]))


def test_a_key_that_is_refused_is_told(base_url: str) -> None:
    options = server_arguments("").parse_args(["--base-url", base_url])
    with pytest.raises(SystemExit, match=r"does not name its models: .*key"):
        find_server(options)


def test_a_server_that_is_not_there_is_told() -> None:
    with address_without_a_server() as base_url:
        options = server_arguments("").parse_args(["--base-url", base_url])
        with pytest.raises(SystemExit) as ended:
            find_server(options)
    # A text is what sys.exit prints, with 1 as the exit code.
    assert str(ended.value.code).startswith(f"no server answers at {base_url} ")
    assert str(ended.value.code).endswith("start one with: make serve")
