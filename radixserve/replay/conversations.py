"""tau-bench's trajectories: whole conversations in text, which a tokenizer turns into prompts."""

from array import array
from typing import Any

import msgspec

from radixserve.core.eviction.answer import Answer
from radixserve.replay.sessions import Session, TimedRequest, interleave
from radixserve.replay.trace import Trace
from radixserve.tokenizer.hermes import with_calls_as_text
from radixserve.tokenizer.tokenizer import Tokenizer


class Trajectory(msgspec.Struct):
    """One conversation; messages as in the chat API."""

    traj: list[dict[str, Any]]


def read_conversations(name: str, trajectories: list[Trajectory], tokenizer: Tokenizer, num_slots: int) -> Trace:
    """Return a request for each answer of an assistant, with all messages before it as its prompt.

    There are no times: num_slots conversations go on side by side, and each in turn sends its next request, when all
    answers of the turn before have ended.
    """
    sessions = [_session(trajectory.traj, tokenizer) for trajectory in trajectories]
    return Trace(name, 1, interleave(sessions, num_slots), num_slots)


def _session(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> Session:
    turns = [end for end, message in enumerate(messages) if message.get("role") == "assistant" and end > 0]
    requests = []
    for turn, end in enumerate(turns):
        ids = array("i", tokenizer.encode_chat(messages[:end]))
        requests.append(TimedRequest(turn, turn + 1, b"", ids, _answer(messages[end], tokenizer)))
    return Session(requests, float(len(turns)))


def _answer(message: dict[str, Any], tokenizer: Tokenizer) -> Answer:
    (written,) = with_calls_as_text([message])
    token_ids = tokenizer.encode(written.get("content") or "", add_special_tokens=False)
    return Answer(bool(message.get("tool_calls")), len(token_ids))
