"""tau-bench's trajectories: whole conversations in text, which a tokenizer turns into prompts."""

from array import array
from typing import Any

import msgspec

from radixserve.replay.sessions import Session, interleave
from radixserve.replay.trace import Trace, TracedRequest
from radixserve.tokenizer.tokenizer import Tokenizer


class Trajectory(msgspec.Struct):
    """One conversation; messages as in the chat API."""

    traj: list[dict[str, Any]]


def read_conversations(name: str, trajectories: list[Trajectory], tokenizer: Tokenizer, num_slots: int) -> Trace:
    """Return a request for each answer of an assistant, with all messages before it as its prompt.

    There are no times: num_slots conversations go on side by side, and each in turn sends its next request.
    """
    sessions = [_session(trajectory.traj, tokenizer) for trajectory in trajectories]
    return Trace(name, 1, interleave(sessions, num_slots), num_slots)


def _session(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> Session:
    turns = [end for end, message in enumerate(messages) if message.get("role") == "assistant" and end > 0]
    requests = [
        (float(turn), TracedRequest(b"", array("i", tokenizer.encode_chat(messages[:end]))))
        for turn, end in enumerate(turns)
    ]
    return Session(requests, float(len(turns)))
