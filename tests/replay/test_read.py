import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from radixserve.core.eviction.answer import Answer
from radixserve.errors import ConfigError
from radixserve.replay import read
from radixserve.replay.conversations import Trajectory, read_conversations
from radixserve.replay.read import read_trace
from radixserve.replay.trace import EndedAnswer, Trace
from tests.byte_tokenizer import load_byte_tokenizer, write_byte_tokenizer


def write_lines(file: Path, *lines: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def ids_of(trace: Trace) -> list[list[int]]:
    return [list(request.ids) for request in trace.requests]


MOONCAKE = [
    {"timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]},
    {"timestamp": 9, "input_length": 600, "output_length": 9, "hash_ids": [1, 3]},
    {"timestamp": 5, "input_length": 512, "output_length": 9, "hash_ids": [4]},
]


def test_mooncake_runs_by_time_and_in_the_order_of_the_file_at_equal_times(tmp_path: Path) -> None:
    trace = read_trace(write_lines(tmp_path / "m.jsonl", *MOONCAKE), 32)
    assert ids_of(trace) == [[1, 2], [4], [1, 3]]
    assert (trace.name, trace.tokens_per_id, trace.num_sessions) == ("m.jsonl", 512, None)
    assert {request.namespace for request in trace.requests} == {b""}


def test_of_mooncakes_answers_the_length_is_known_when_the_next_request_comes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1, "hash_ids": []},
        *MOONCAKE[:2],
        MOONCAKE[2] | {"output_length": 33},
        {"timestamp": 20, "hash_ids": [5]},
    ]
    trace = read_trace(write_lines(tmp_path / "m.jsonl", *lines), 32)
    expected = [
        EndedAnswer(Answer(None, 9), 1),
        EndedAnswer(Answer(None, 33), 2),
        EndedAnswer(Answer(None, 9), 3),
        None,
    ]
    assert [request.ended for request in trace.requests] == expected


def test_a_gzipped_trace_is_read_like_a_plain_one_whatever_its_name(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "trace", *MOONCAKE)
    expected = ids_of(read_trace(plain, 32))
    plain.write_bytes(gzip.compress(plain.read_bytes()))
    assert ids_of(read_trace(plain, 32)) == expected


def request(t: float, hash_ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"t": t, "in": 64 * sum(hash_ids[1::2]) + 9, "out": 5, "hash_ids": hash_ids, "stop": "tool_use", **fields}


def coding_session(name: str, *requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests, **fields}


def test_a_coding_session_has_runs_of_ids_that_are_its_own(tmp_path: Path) -> None:
    first = coding_session("a", request(0, [1, 3]), request(9, [1, 2, 7, 1, 20, 2]))
    trace = read_trace(write_lines(tmp_path / "c.jsonl", first, coding_session("b", request(0, [1, 3]))), 1)
    assert ids_of(trace) == [[1, 2, 3], [1, 2, 7, 20, 21], [1, 2, 3]]
    assert (trace.tokens_per_id, trace.num_sessions) == (64, 1)
    namespaces = [request.namespace for request in trace.requests]
    assert namespaces[0] == namespaces[1] != namespaces[2]


def test_ids_given_one_by_one_and_ids_that_all_sessions_share_are_read_too(tmp_path: Path) -> None:
    plain = request(0, [1, 2, 5, 9]) | {"in": 4 * 64 + 63}
    lines = [coding_session(name, plain, hash_id_scope="global") for name in "ab"]
    trace = read_trace(write_lines(tmp_path / "c.jsonl", *lines), 1)
    assert ids_of(trace) == [[1, 2, 5, 9], [1, 2, 5, 9]]
    assert {request.namespace for request in trace.requests} == {b""}


def test_a_request_follows_the_end_of_the_last_one_after_a_pause_of_at_most_600_seconds(tmp_path: Path) -> None:
    # Session a sends at 0, 15 (5 + 10) and 616 (15 + 1 + 600); ids tell when b's requests are to come.
    a = coding_session(
        "a",
        request(0, [1, 1], api_time=5, think_time=0),
        request(15, [2, 1], api_time=1, think_time=10),
        request(9000, [3, 1], think_time=8984),
    )
    b = coding_session(
        "b",
        request(0, [10, 1], api_time=14.5),
        request(0, [11, 1], api_time=1),
        request(0, [12, 1], api_time=600),
        request(0, [13, 1], think_time=0.4),
        request(0, [14, 1], think_time=0.2),
    )
    trace = read_trace(write_lines(tmp_path / "c.jsonl", a, b), 2)
    assert ids_of(trace) == [[1], [10], [11], [2], [12], [13], [3], [14]]


def test_a_sub_agent_runs_beside_its_session_with_the_same_ids(tmp_path: Path) -> None:
    agent = {
        "t": 4,
        "agent_id": "agent_1",
        "requests": [request(0, [1, 1, 30, 1], api_time=3), request(4, [1, 1, 30, 2], think_time=1)],
    }
    line = coding_session(
        "a", request(0, [1, 1], api_time=2), agent, request(6, [1, 2], api_time=3, think_time=4), request(12, [1, 3])
    )
    trace = read_trace(write_lines(tmp_path / "c.jsonl", line), 1)
    # The agent at 4 and 8, the session at 0, 6 and 9.
    assert ids_of(trace) == [[1], [1, 30], [1, 2], [1, 30, 31], [1, 2, 3]]
    assert len({request.namespace for request in trace.requests}) == 1


def test_an_answer_of_a_coding_session_ends_after_api_time_as_stop_says(tmp_path: Path) -> None:
    a = coding_session(
        "a",
        request(0, [1, 1], api_time=5, out=70),
        {"t": 1, "agent_id": "agent_1", "requests": [request(0, [1, 2], api_time=1, out=8, stop="end_turn")]},
        request(0, [1, 2], api_time=1, stop="", out=3),
        request(0, [1, 3]),
    )
    unlike = [request(0, [2, 1]), request(0, [2, 2])]
    del unlike[0]["stop"], unlike[1]["out"]
    trace = read_trace(write_lines(tmp_path / "c.jsonl", a, coding_session("b", *unlike)), 1)
    # a's at 0, 1 (the agent), 5 and 6; b's both at 6.
    assert ids_of(trace) == [[1], [1, 2], [1, 2], [1, 2, 3], [2], [2, 3]]
    assert [request.ended for request in trace.requests] == [
        EndedAnswer(Answer(True, 70), 2),
        EndedAnswer(Answer(False, 8), 2),
        EndedAnswer(Answer(None, 3), 3),
        EndedAnswer(Answer(True, 5), 4),
        EndedAnswer(Answer(None, 5), 5),
        None,
    ]


def test_sessions_with_an_input_above_200_000_tokens_are_left_out(tmp_path: Path) -> None:
    long = request(0, [1, 2]) | {"in": 200_001}
    agent = {"t": 1, "agent_id": "x", "requests": [long]}
    lines = [
        coding_session("a", request(0, [5, 1]), long),
        coding_session("b", request(0, [6, 1]), agent),
        coding_session("c", request(0, [7, 1]) | {"in": 200_000}),
    ]
    assert ids_of(read_trace(write_lines(tmp_path / "c.jsonl", *lines), 2)) == [[7]]


TRAJECTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "bye"},
    {"role": "user", "content": "###STOP###"},
]


def test_each_answer_of_a_conversation_is_a_request_with_all_that_came_before(tmp_path: Path) -> None:
    tokenizer = load_byte_tokenizer(tmp_path)
    trace = read_conversations("t", [Trajectory(TRAJECTORY), Trajectory(TRAJECTORY[:3])], tokenizer, 2)
    first, second = tokenizer.encode_chat(TRAJECTORY[:2]), tokenizer.encode_chat(TRAJECTORY[:4])
    assert ids_of(trace) == [first, first, second]
    assert (trace.tokens_per_id, trace.num_sessions) == (1, 2)


def test_an_answer_of_a_conversation_has_its_text_and_calls_and_ends_with_its_turn(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "One.", "tool_calls": None},
    ]
    trace = read_conversations("t", [Trajectory(messages)] * 3, load_byte_tokenizer(tmp_path), 2)
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    calls, talks = Answer(True, len(written)), Answer(False, len("One."))
    assert [request.ended for request in trace.requests] == [
        EndedAnswer(calls, 2),
        EndedAnswer(calls, 2),
        EndedAnswer(talks, 4),
        EndedAnswer(talks, 4),
        EndedAnswer(calls, 5),
        EndedAnswer(talks, 6),
    ]


def test_conversations_are_encoded_by_the_demo_models_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "resolve_model_path", lambda model: {None: write_byte_tokenizer(tmp_path)}[model])
    file = tmp_path / "t.json"
    file.write_text(json.dumps([{"task_id": 0, "reward": 1.0, "traj": TRAJECTORY, "trial": 0}]))
    assert [bytes(b for b in ids if b < 256)[:6] for ids in ids_of(read_trace(file, 1))] == [b"system", b"system"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no request"),
        (b"[]", "holds no request"),
        (b'{"timestamp": 0, "hash_ids": []}', "holds no request"),
        (b'{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 1}', "line 2 of"),
        (b'{"timestamp": 0, "hash_ids": [-1]}', "hash_ids"),
        (b'{"timestamp": 0, "hash_ids": [2147483648]}', "hash_ids"),
        (b'{"id": "a", "block_size": 64, "hash_id_scope": "planet", "requests": []}', "hash_id_scope"),
        (b'{"id": "a", "block_size": 0, "requests": []}', "block_size"),
        (b'[{"trajectory": []}]', "traj"),
        (b"hello", "line 1 of"),
        (b"\x1f\x8b nonsense", "cannot read"),
        (gzip.compress(b'{"timestamp": 0, "hash_ids": [1]}')[:-9], "cannot read"),
    ],
)
def test_a_file_of_no_known_format_is_an_error_that_says_where(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_trace(file, 1)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none", 1)


def test_sessions_of_several_block_sizes_are_an_error(tmp_path: Path) -> None:
    lines = [coding_session("a", request(0, [1, 1])), coding_session("b", request(0, [1, 1]), block_size=32)]
    with pytest.raises(ConfigError, match=r"\[32, 64\]"):
        read_trace(write_lines(tmp_path / "c.jsonl", *lines), 1)
