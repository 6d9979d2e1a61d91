"""What the cache is told of an answer that has ended."""

from radixserve.core.eviction.answer import Answer
from radixserve.core.sequence import Sequence
from radixserve.tokenizer.tokenizer import Tokenizer


def ended_answer(sequence: Sequence, tokenizer: Tokenizer) -> Answer:
    """Return how long a finished sequence's answer is, and whether it calls a tool.

    It does if its text begins a call and was not cut off; whether that call is right shows only to who parses it. The
    text is decoded for that, once and only where a call is possible: a token of other answers costs nothing.
    """
    request = sequence.request
    calls_tool = False
    if request.tool_call_begin is not None and sequence.finish_reason == "stop":
        token_ids = sequence.token_ids[request.num_prompt_tokens :]
        calls_tool = request.tool_call_begin in tokenizer.decode(token_ids, skip_special_tokens=False)
    return Answer(calls_tool, sequence.num_output_tokens)
