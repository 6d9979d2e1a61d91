"""Which pins a request may bring."""

from radixserve.beam_search_params import BeamSearchParams
from radixserve.protocol import AddRequest, Failure

MAX_TTL_DAYS = 30


def reason_to_refuse_pins(message: AddRequest, *, shares_prefixes: bool) -> Failure | None:
    """Return what is wrong with a request's pins, or None. Whether there is room for them is another matter."""
    if not message.pins:
        return None
    num_prompt_tokens = len(message.prompt_token_ids) // 4
    text = None
    if not shares_prefixes:
        text = "nothing can be pinned without a prefix cache; start the server without --no-prefix-cache"
    elif isinstance(message.params, BeamSearchParams):
        text = "a beam search pins nothing; pin the prompt by a request of its own"
    for pin in message.pins:
        if not 1 <= pin.num_tokens <= num_prompt_tokens:
            text = f"a pin covers {pin.num_tokens} tokens, and the prompt has {num_prompt_tokens}; pin 1 to all of them"
        elif not 0 < pin.ttl <= MAX_TTL_DAYS * 86400:
            text = f"a pin is to last {pin.ttl:g} s; give more than 0 and at most {MAX_TTL_DAYS} days"
    return None if text is None else Failure("invalid_request", text)
