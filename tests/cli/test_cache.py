import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from radixserve.cli import cache
from radixserve.cli.main import main
from tests.fake_server import FakeServer, serving

PINNED = {"object": "cache.pin", "id": "abc", "tokens": 70, "blocks": 5, "expires_at": 10**9, "ttl": 3600}
REPORT: dict[str, Any] = {
    "block_size": 16,
    "blocks": {"total": 200, "free": 50, "cached": 100, "in_use": 50, "pinned": 20},
    "tokens": {"queried": 1000, "hit": 250, "hit_rate": 0.25, "evicted": 7},
    "requests": {"running": 3, "waiting": 4},
    "tree": {"nodes": 12, "depth": 5},
    "tiers": [],
}


class FakeCacheServer(FakeServer):
    """Answers every cache route with what is set for its method and path, and keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {"GET /v1/cache": REPORT}
        self.calls: list[tuple[str, Any]] = []

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/{path:path}", self._answer, methods=["GET", "POST", "DELETE"])])

    async def _answer(self, request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        call = f"{request.method} {request.url.path}"
        body = await request.body()
        self.headers.append(dict(request.headers))
        self.calls.append((call + query, json.loads(body) if body else None))
        answer = self.answers.get(call)
        if answer is None:
            return JSONResponse({"error": {"message": f"there is no route {call}"}}, status_code=404)
        return JSONResponse(answer)


@pytest.fixture
def fake() -> Iterator[FakeCacheServer]:
    server = FakeCacheServer()
    with serving(server):
        yield server


def run(fake: FakeServer, *argv: str) -> int:
    return main(["cache", *argv, "--base-url", fake.url])


def test_stats_shows_blocks_by_state_and_hits(fake: FakeCacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake, "stats", "--api-key", "k") == 0
    output = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for name, count, share in (("in use", 50, "25.0"), ("cached", 100, "50.0"), ("free", 50, "25.0")):
        assert any(line.startswith(name) and line.endswith(f"{count} {share} %") for line in lines), lines
    assert "hit rate 25.0 %" in lines
    assert "not in the cache 750" in lines
    assert "\x1b" not in output
    assert fake.headers[0]["authorization"] == "Bearer k"


def test_stats_shows_each_tier_and_whether_it_is_on(fake: FakeCacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {
        f"{name}_blocks": 1000 + index for index, name in enumerate(("hit", "read", "written", "dropped", "failed"))
    }
    tier = {
        "name": "disk",
        "is_on": True,
        "capacity_bytes": 20 * 2**30,
        "used_bytes": 3 * 2**29,
        "blocks": 4321,
        **counts,
    }
    fake.answers["GET /v1/cache"] = REPORT | {"tiers": [tier, {**tier, "name": "host", "is_on": False}]}
    assert run(fake, "stats") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert (
        "1.5 GiB of 20.0 GiB, 4,321 blocks 1,000 hit, 1,001 read, 1,002 written, 1,003 dropped, 1,004 failed" in words
    )
    assert words.count("off since an error") == 1


def test_stats_of_a_tenant_has_no_tree(fake: FakeCacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["GET /v1/cache"] = {key: value for key, value in REPORT.items() if key != "tree"}
    assert run(fake, "stats") == 0
    assert "tree" not in capsys.readouterr().out


def test_json_is_the_answer_on_one_line(fake: FakeCacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake, "stats", "--json") == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert json.loads(output) == REPORT


def watched(fake: FakeCacheServer, monkeypatch: pytest.MonkeyPatch, reports: list[Any], *argv: str) -> int:
    """Watch a cache that gives these reports, a second apart; Ctrl-C comes after the last one."""
    rest = iter(reports[1:])
    seconds = iter(range(len(reports)))
    fake.answers["GET /v1/cache"] = reports[0]

    async def sleep(_: float) -> None:
        report = next(rest, None)
        if report is None:
            raise KeyboardInterrupt
        fake.answers["GET /v1/cache"] = report

    monkeypatch.setattr(cache, "sleep", sleep)
    monkeypatch.setattr(cache, "monotonic", lambda: float(next(seconds)))
    return run(fake, "stats", "--watch", *argv)


def test_watch_shows_rates_of_the_last_interval_until_ctrl_c(
    fake: FakeCacheServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = REPORT | {"tokens": {"queried": 1400, "hit": 550, "hit_rate": 0.39, "evicted": 7}}
    assert watched(fake, monkeypatch, [REPORT, later]) == 0
    output = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert "read from the cache 250" in lines
    assert "read from the cache 550 300" in lines
    assert "not in the cache 850 100" in lines
    assert "hit rate 39.3 % 75.0 %" in lines
    assert "\x1b" not in output


def test_watch_has_no_rate_over_the_start_of_a_new_engine(
    fake: FakeCacheServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = REPORT | {"tokens": {"queried": 10, "hit": 5, "hit_rate": 0.5, "evicted": 0}}
    assert watched(fake, monkeypatch, [REPORT, later]) == 0
    assert "a second" not in capsys.readouterr().out


def test_watch_prints_json_lines(
    fake: FakeCacheServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watched(fake, monkeypatch, [REPORT, REPORT], "0.5", "--json") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [REPORT, REPORT]


def test_pin_sends_the_file_with_its_time(
    fake: FakeCacheServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["POST /v1/cache/pin"] = PINNED
    file = tmp_path / "chat.json"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    assert run(fake, "pin", str(file), "--ttl", "1h") == 0
    assert fake.calls == [
        ("POST /v1/cache/pin", {"messages": [{"role": "user", "content": "hi"}], "ttl": 3600.0}),
    ]
    output = capsys.readouterr().out
    assert output.startswith("pinned 70 tokens in 5 blocks until ")
    assert output.endswith("; radixserve cache unpin abc ends it\n")


def test_a_request_is_read_from_standard_input(fake: FakeCacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.answers["POST /v1/cache/pin"] = PINNED
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "hi"}')))
    assert run(fake, "pin", "-") == 0
    assert fake.calls[0][1] == {"prompt": "hi"}


def test_a_time_in_the_file_counts_unless_another_is_given(fake: FakeCacheServer, tmp_path: Path) -> None:
    fake.answers["POST /v1/cache/pin"] = PINNED
    file = tmp_path / "body.json"
    file.write_text('{"prompt": "hi", "ttl": "1h"}')
    for times in ((), ("--ttl", "2m")):
        assert run(fake, "pin", str(file), *times) == 0
    assert [body["ttl"] for _, body in fake.calls] == ["1h", 120.0]


def test_unpin_names_the_pin_whatever_is_in_its_id(fake: FakeCacheServer) -> None:
    fake.answers["DELETE /v1/cache/pin/abc"] = {}
    assert run(fake, "unpin", "abc") == 0
    assert run(fake, "unpin", "../reset") == 1
    assert [call for call, _ in fake.calls] == ["DELETE /v1/cache/pin/abc", "DELETE /v1/cache/pin/../reset"]


def test_reset_says_what_was_dropped(fake: FakeCacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["POST /v1/cache/reset"] = {"dropped_blocks": 3, "kept_blocks": 2}
    assert run(fake, "reset") == 0
    assert capsys.readouterr().out == "dropped blocks: 3\nkept blocks: 2\n"


def test_a_refusal_is_one_line_and_exit_code_1(fake: FakeCacheServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake, "save") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "answered 404: there is no route POST /v1/cache/save" in error


@pytest.mark.parametrize("answer", [[], {"block_size": 16}, {**REPORT, "blocks": None}])
def test_another_servers_answer_is_one_line_and_exit_code_1(
    answer: Any, fake: FakeCacheServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["GET /v1/cache"] = answer
    assert run(fake, "stats") == 1
    assert "not of the expected form" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), ("[1]", "no request body"), ("\xff", "no request body")]
)
def test_a_file_without_a_request_is_one_line_and_exit_code_2(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "body.json"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    assert main(["cache", "pin", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize("text", ["0", "0s", "5 m", "-1", "x", "1h30m", "\u0665m"])
def test_what_is_no_time_is_one_line_and_exit_code_2(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "pin", "body.json", f"--ttl={text}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--ttl" in error


def node(depth: int = 1, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "id": 0,
        "parent": parent,
        "depth": depth,
        "position": 0,
        "tokens": 64,
        "blocks": 4,
        "preview": "text",
        "preview_tokens": 48,
        "holders": 0,
        "requests": [],
        "idle_seconds": 130.0,
        "hits": 0,
        "pinned_blocks": 0,
        "tail": False,
        **fields,
    }


def tree_of(fake: FakeCacheServer, nodes: list[dict[str, Any]], total: int | None = None) -> None:
    fake.answers["GET /v1/cache/tree"] = {"nodes": nodes, "total_nodes": len(nodes) if total is None else total}


def test_tree_shows_who_uses_what(
    fake: FakeCacheServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    tree_of(
        fake,
        [
            node(preview="You are an agent", holders=2, pinned_blocks=4, hits=9),
            node(2, 0, preview="What is", holders=1, requests=["job-1"], pinned_blocks=3),
            node(2, 0, preview="Who is it?", preview_tokens=7, tokens=7, hits=1, tail=True),
        ],
        total=10,
    )
    assert run(fake, "tree") == 0
    top, first, second, left_out = capsys.readouterr().out.splitlines()
    assert "64 tokens  in use x2  pinned  9 hits  You are an agent..." in top
    assert "── 64 tokens  in use by job-1  pinned 3 of 4 blocks  What is..." in first
    assert "── 7 tokens (tail)  idle 2 min  1 hit  Who is it?" in second
    assert not second.endswith("...")
    assert "7 more nodes" in left_out


@pytest.mark.parametrize("width", [30, 50, 200])
def test_tree_keeps_to_the_width_and_lets_no_text_command_the_terminal(
    width: int, fake: FakeCacheServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    hostile = "a\x1b[2Jb\nc\x9b1m\u202ed[red]e" + "漢字" * 50
    tree_of(fake, [node(depth + 1, depth - 1 if depth else None, preview=hostile) for depth in range(20)])
    assert run(fake, "tree", "--depth", "20") == 0
    output = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\u202e"} & set(output)
    lines = output.splitlines()
    assert len(lines) == 20
    assert all(cell_len(line) <= width for line in lines)
    assert width < 200 or "a\\u001b[2Jb\\nc\\u009b1m\\u202ed[red]e" in output


def test_tree_asks_for_what_is_wanted_and_for_no_more_levels_than_fit(
    fake: FakeCacheServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tree_of(fake, [])
    assert run(fake, "tree") == 0
    assert run(fake, "tree", "--depth", "3", "--max-nodes", "5", "--json") == 0
    assert [call for call, _ in fake.calls] == [
        "GET /v1/cache/tree?depth=9",
        "GET /v1/cache/tree?depth=3&max_nodes=5",
    ]
    assert capsys.readouterr().out == 'nothing is cached\n{"nodes":[],"total_nodes":0}\n'


def test_a_tree_that_refers_to_nothing_is_not_of_the_expected_form(
    fake: FakeCacheServer, capsys: pytest.CaptureFixture[str]
) -> None:
    tree_of(fake, [node(2, 7)])
    assert run(fake, "tree") == 1
    assert "not of the expected form" in capsys.readouterr().err
