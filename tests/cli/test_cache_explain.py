import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixserve.cli.cache_explain import marked
from tests.cli.test_cache import FakeCacheServer, run
from tests.fake_server import serving

ROUTE = "POST /v1/cache/explain"
REQUEST = {"messages": [{"role": "user", "content": "hi"}]}
DIVERGED: dict[str, Any] = {
    "prompt_tokens": 90,
    "cached_tokens": 20,
    "tier_tokens": 0,
    "verdict": "20 of 90 tokens hit: a time or date changed at token 20, in messages[0], the system",
    "is_expected": False,
    "cause": "diverged",
    "divergence": {
        "position": 20,
        "message_index": 0,
        "where": "system",
        "cached_text": "It is 09:15 now.\nAnswer shortly.",
        "prompt_text": "It is 09:17 now.\nAnswer shortly.",
        "pattern": "timestamp",
        "advice": "move the time behind what stays the same",
    },
}


@pytest.fixture
def fake() -> Iterator[FakeCacheServer]:
    server = FakeCacheServer()
    with serving(server):
        yield server


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(REQUEST))
    return str(path)


def test_both_texts_are_shown_with_what_differs_marked(
    fake: FakeCacheServer, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers[ROUTE] = DIVERGED
    assert run(fake, "explain", file, "--api-key", "k") == 0
    assert fake.calls == [(ROUTE, REQUEST)]
    assert fake.headers[0]["authorization"] == "Bearer k"
    output = " ".join(capsys.readouterr().out.split())
    assert DIVERGED["verdict"] in output
    assert "cached It is 09:1[[5]] now." in output
    assert "prompt It is 09:1[[7]] now." in output
    assert "timestamp: move the time" in output


def test_what_is_as_expected_is_a_line(fake: FakeCacheServer, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers[ROUTE] = {
        "prompt_tokens": 9,
        "cached_tokens": 8,
        "tier_tokens": 0,
        "verdict": "nothing wrong: 8 of 9 tokens hit",
        "is_expected": True,
        "cause": "none",
    }
    assert run(fake, "explain", file) == 0
    assert capsys.readouterr().out == "nothing wrong: 8 of 9 tokens hit\n"


def test_json_is_the_servers_answer(fake: FakeCacheServer, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers[ROUTE] = DIVERGED
    assert run(fake, "explain", file, "--json") == 0
    assert json.loads(capsys.readouterr().out) == DIVERGED


@pytest.mark.parametrize("answer", [None, {"verdict": "what"}])
def test_a_server_that_cannot_be_asked_is_a_failure(fake: FakeCacheServer, file: str, answer: Any) -> None:
    fake.answers[ROUTE] = answer
    assert run(fake, "explain", file) == 1


def test_nothing_in_a_text_steers_the_terminal(
    fake: FakeCacheServer, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = {**DIVERGED["divergence"], "cached_text": "a\x1b[2Jb [red]c[/red]", "prompt_text": "a\rd"}
    fake.answers[ROUTE] = DIVERGED | {"divergence": hostile}
    assert run(fake, "explain", file) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\r" not in output
    assert "[red]c[/red]" in output


def test_a_terminal_that_lacks_a_character_is_shown_its_number(
    fake: FakeCacheServer, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    divergence = {**DIVERGED["divergence"], "cached_text": "caf\u00e9\nopen", "prompt_text": "caf\u00e9\nshut"}
    fake.answers[ROUTE] = DIVERGED | {"divergence": divergence}
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert run(fake, "explain", file) == 0
    assert b"cached  caf\\xe9\\n[[open]]" in shown.getvalue()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("abc", "axc", ("a[[b]]c", "a[[x]]c")),
        ("abc", "abbc", ("abc", "ab[[b]]c")),
        ("same", "same", ("same", "same")),
        ("", "a", ("", "[[a]]")),
        (
            "It is 10:31:07.<|im_end|> Hi<|im_end|> Hello! How can I help?",
            "It is 10:31:52.<|im_end|> Hi<|im_end|> ",
            (
                "It is 10:31:[[07]].<|im_end|> Hi<|im_end|> Hello! How can I help?",
                "It is 10:31:[[52]].<|im_end|> Hi<|im_end|> ",
            ),
        ),
        ("a word more here, then this", "a here, then that", ("a [[word more ]]here, then this", "a here, then that")),
    ],
)
def test_the_first_part_that_differs_is_marked(one: str, other: str, expected: tuple[str, str]) -> None:
    assert tuple(text.plain for text in marked(one, other)) == expected
