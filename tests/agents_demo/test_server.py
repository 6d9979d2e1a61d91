"""The demos say in one line what is wrong with their flags or their server."""

from collections.abc import Iterator
from typing import Any

import pytest

from agents_demo import react_langchain, react_openai, tree_of_thought
from agents_demo.server import Server, find_server, server_arguments
from tests.fake_server import FakeServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def found(*flags: str) -> Server:
    return find_server(server_arguments("a demo").parse_args(flags))


def test_the_first_model_is_taken_unless_one_is_named(server: FakeServer) -> None:
    expected = Server(server.url, "none", "fake/model")
    assert found("--base-url", expected.base_url) == expected
    assert found("--base-url", expected.base_url, "--model", "fake/model") == expected


def test_a_server_that_refuses_is_not_called_missing(server: FakeServer) -> None:
    with pytest.raises(SystemExit, match=r"refuses: .*; most base URLs end in /v1"):
        found("--base-url", server.url.removesuffix("/v1"))


def test_a_model_that_is_not_served_is_named_with_those_that_are(server: FakeServer) -> None:
    with pytest.raises(SystemExit, match="does not serve other; it serves fake/model"):
        found("--base-url", server.url, "--model", "other")


@pytest.mark.parametrize(
    ("demo", "flag"),
    [
        (react_openai, "--max-steps"),
        (react_langchain, "--max-steps"),
        (tree_of_thought, "--keep"),
        (tree_of_thought, "--samples"),
    ],
)
def test_a_count_below_one_is_refused_before_anything_runs(
    demo: Any, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["demo", flag, "0"])
    with pytest.raises(SystemExit):
        demo.main()
    assert f"argument {flag}: 0 is not at least 1" in capsys.readouterr().err
