"""A stub model that answers a chat by its last user message."""

from collections.abc import Mapping, Sequence

from tests.byte_tokenizer import END, SPECIAL_TOKENS
from tests.stub import Table

_NAMES = {token_id: name for name, token_id in SPECIAL_TOKENS.items()}
_OPENING = "<|start|>assistant\n"


def speaker(replies: Mapping[str, str]) -> Table:
    """A model of the byte tokenizer that says, word for word, the reply to the first key that a conversation holds.

    Keys are looked for in what stands before the assistant's last turn, later messages first.
    """

    def table(context: Sequence[int]) -> Mapping[int, float]:
        text = "".join(_NAMES.get(token_id) or chr(token_id) for token_id in context)
        prompt, _, said = text.rpartition(_OPENING)
        found = max(replies, key=prompt.rfind)
        assert found in prompt, f"there is no reply to {prompt!r}"
        reply = replies[found].encode()
        return {reply[len(said)] if len(said) < len(reply) else END: 1.0}

    return table
