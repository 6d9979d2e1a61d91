"""The terminal chat, as one types into it, against a server on loopback."""

import io
import signal
from collections.abc import Iterator

import pytest
from starlette.responses import JSONResponse

from radixserve.cli import chat
from radixserve.cli.main import main
from tests.cli.keyboard import type_in
from tests.fake_server import FakeServer, serving

GONE_SECONDS = 10


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def chat_with(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, lines: str, *flags: str, is_terminal: bool = False
) -> int:
    type_in(monkeypatch, lines, is_terminal=is_terminal)
    return main(["chat", "--base-url", fake.url, "--max-tokens", "4", *flags])


def interrupt_after(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C as soon as this much has been shown, once."""
    shown: list[str] = []
    write = chat.Terminal.write

    def write_and_interrupt(terminal: chat.Terminal, piece: str) -> None:
        write(terminal, piece)
        shown.append(piece)
        if "".join(shown) == text:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat.Terminal, "write", write_and_interrupt)


def contents(body: dict[str, list[dict[str, str]]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_a_piped_line_is_answered_on_stdout_alone(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat_with(fake, monkeypatch, "hi\n") == 0
    output = capsys.readouterr()
    assert output.out == "Hello there, friend\n"
    for words in ("prompt 6 tokens", "0 cached", "4 generated", "tokens/s"):
        assert words in output.err


def test_each_turn_resends_the_conversation_and_reports_the_cache_hit(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat_with(fake, monkeypatch, "one\n\ntwo", "--system", "Be brief.", "--model", "m")
    answer = ("assistant", "Hello there, friend")
    assert contents(fake.bodies[0]) == [("system", "Be brief."), ("user", "one")]
    assert contents(fake.bodies[1]) == [("system", "Be brief."), ("user", "one"), answer, ("user", "two")]
    assert {body["model"] for body in fake.bodies} == {"m"}
    assert {(body["max_tokens"], body["temperature"]) for body in fake.bodies} == {(4, 0.7)}
    assert "14 cached" in capsys.readouterr().err


def test_commands_change_the_conversation_and_are_not_sent(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "/system Talk.\none\n/reset\ntwo\n/reset\n/system\nthree\n/help\n/nonsense\n/etc/hosts\n/exit\nnever\n"
    chat_with(fake, monkeypatch, lines)
    assert [contents(body) for body in fake.bodies[:3]] == [
        [("system", "Talk."), ("user", "one")],
        [("system", "Talk."), ("user", "two")],
        [("user", "three")],
    ]
    assert contents(fake.bodies[3])[-1] == ("user", "/etc/hosts")
    assert len(fake.bodies) == 4
    error = capsys.readouterr().err
    assert chat.COMMANDS in error
    assert "there is no /nonsense" in error


def test_ctrl_c_stops_the_answer_keeps_its_text_and_leaves_the_server(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.held_calls = {1}
    interrupt_after("Hello there, friend", monkeypatch)
    assert chat_with(fake, monkeypatch, "one\ntwo\n", is_terminal=True) == 0
    assert "stopped: " in capsys.readouterr().err
    assert contents(fake.bodies[1]) == [("user", "one"), ("assistant", "Hello there, friend"), ("user", "two")]
    assert fake.has_left.wait(GONE_SECONDS)


def test_ctrl_c_ends_a_script(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.held_calls = {1}
    interrupt_after("Hello there, friend", monkeypatch)
    assert chat_with(fake, monkeypatch, "one\ntwo\n") == 130
    assert len(fake.bodies) == 1
    assert fake.has_left.wait(GONE_SECONDS)


def test_ctrl_c_at_the_prompt_does_not_end_the_chat_and_ctrl_d_does(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat_with(fake, monkeypatch, "^C\nhi\n", is_terminal=True) == 0
    output = capsys.readouterr()
    assert output.out == "Hello there, friend\n"
    assert "fake/model at http://127.0.0.1" in output.err
    assert "Ctrl-D" in output.err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_error_ends_a_script_and_leaves_a_terminal_chat_going(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    fake.failing_calls = {1: JSONResponse({"error": {"message": "too long"}}, status_code=400)}
    code = chat_with(fake, monkeypatch, "one\ntwo\n", is_terminal=is_terminal)
    assert "answered 400: too long" in capsys.readouterr().err
    assert code == (0 if is_terminal else 1)
    assert [contents(body) for body in fake.bodies] == [[("user", "one")], [("user", "two")]][: 1 + is_terminal]


def test_counts_that_a_server_does_not_report_are_left_out(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.reports_usage = False
    chat_with(fake, monkeypatch, "hi")
    error = capsys.readouterr().err
    assert "4 generated" in error
    assert "prompt" not in error


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_of_an_answer_do_not_reach_a_terminal() -> None:
    for stdout, expected in ((Screen(), "a[2Jb\n\tc"), (io.StringIO(), "a\x1b[2Jb\n\tc")):
        chat.Terminal(io.StringIO(), stdout, io.StringIO()).write("a\x1b[2Jb\n\tc")
        assert stdout.getvalue() == expected
