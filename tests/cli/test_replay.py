import json
from pathlib import Path

import pytest

from radixserve.cli.main import main
from radixserve.config import EngineConfig

FIELDS = [
    "trace",
    "policy",
    "capacity_tokens",
    "sessions",
    "hit_rate",
    "optimum_hit_rate",
    "infinite_hit_rate",
    "miss_amplification",
    "prefill_amplification",
]


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    """A cycle of three requests, ten times round."""
    lines = [json.dumps({"timestamp": time, "hash_ids": [time % 3]}) for time in range(30)]
    file = tmp_path / "cycle.jsonl"
    file.write_text("\n".join(lines))
    return str(file)


@pytest.fixture
def sessions(tmp_path: Path) -> str:
    file = tmp_path / "sessions.jsonl"
    requests = [{"t": t, "in": 128, "hash_ids": [1, 2], "api_time": 1.0} for t in range(3)]
    file.write_text("\n".join(json.dumps({"id": i, "block_size": 64, "requests": requests}) for i in "abc"))
    return str(file)


def test_json_is_one_line_of_the_documented_fields(mooncake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", mooncake, "--capacity-tokens", "1024", "--policy", "lru", "--json"]) == 0
    output = capsys.readouterr()
    assert (output.out.count("\n"), output.err) == (1, "")
    figures = json.loads(output.out)
    assert list(figures) == FIELDS
    assert figures["trace"] == "cycle.jsonl"
    assert (figures["policy"], figures["capacity_tokens"], figures["sessions"]) == ("lru", 1024, None)
    assert (figures["hit_rate"], figures["infinite_hit_rate"]) == (0, 0.9)
    assert figures["miss_amplification"] == pytest.approx(30 / 16)


def test_several_capacities_are_a_line_each(sessions: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "replay", sessions, "--sessions", "3", "--policy", "lru", "--json", "--capacity-tokens"]
    assert main([*argv, "128", "384"]) == 0
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["capacity_tokens"] for line in figures] == [128, 384]
    assert [line["sessions"] for line in figures] == [3, 3]
    assert [line["hit_rate"] for line in figures] == pytest.approx([0, 2 / 3])


def test_the_policy_is_a_servers_unless_it_is_named(mooncake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", mooncake, "--capacity-tokens", "1024", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == EngineConfig().eviction_policy


def test_several_policies_stand_side_by_side(mooncake: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "replay", mooncake, "--policy", "learned-reuse", "lru", "--capacity-tokens", "1024", "1536"]
    assert main([*argv, "--json"]) == 0
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["policy"], line["capacity_tokens"]) for line in figures] == [
        ("learned-reuse", 1024),
        ("lru", 1024),
        ("learned-reuse", 1536),
        ("lru", 1536),
    ]
    assert [line["hit_rate"] for line in figures][1:] == [0, 0.9, 0.9]
    assert len({line["optimum_hit_rate"] for line in figures[:2]}) == 1
    assert main(argv) == 0
    table = capsys.readouterr().out
    assert (table.count("learned-reuse"), table.count("lru")) == (2, 2)


def test_the_sessions_side_by_side_decide_the_order(sessions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", sessions, "--sessions", "1", "--json", "--capacity-tokens", "128"]) == 0
    assert json.loads(capsys.readouterr().out)["hit_rate"] == pytest.approx(2 / 3)


def test_without_json_it_is_a_table(sessions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", sessions, "--capacity-tokens", "384"]) == 0
    table = capsys.readouterr().out
    for words in ("9 requests of 1,152 tokens", "32 sessions side by side", "384", "0.667", "1.00"):
        assert words in table


def test_a_number_of_sessions_that_has_no_effect_is_told(mooncake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", mooncake, "--capacity-tokens", "1024", "--json", "--sessions", "2"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["sessions"] is None
    assert "--sessions has no effect" in output.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--capacity-tokens"),
        (["--capacity-tokens", "0"], "below 1"),
        (["--capacity-tokens", "511"], "must fit"),
        (["--capacity-tokens", "1024", "--policy", "lfu"], "--policy is 'lfu'; it must be learned-reuse or lru"),
        (["--capacity-tokens", "1024", "--sessions", "0"], "below 1"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    mooncake: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "replay", mooncake, *flags]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert words in output.err


def test_a_capacity_that_is_no_number_is_refused_in_words(mooncake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", mooncake, "--capacity-tokens", "many"]) == 2
    assert "--capacity-tokens: 'many' is no whole number" in capsys.readouterr().err
