"""Leave only the tokens that a constraint allows."""

from collections.abc import Sequence

import numpy as np
import torch

from radixserve.core.batch import SampleSlot


def mask_tokens(logits: torch.Tensor, slots: Sequence[SampleSlot], rows: Sequence[int]) -> None:
    """Set to minus infinity, in place, what may not be drawn in rows whose slots have allowed_tokens.

    logits: [num_slots, vocab]. Suppressed ids of these slots go too, unless nothing else is allowed: then the
    constraint's end comes before the minimum length. At least one id that a slot allows is in the vocabulary.
    """
    vocab_size = logits.shape[1]
    is_allowed = np.zeros((len(rows), vocab_size), dtype=np.bool_)
    for index, row in enumerate(rows):
        is_allowed[index] = _allowed(slots[row], vocab_size)
    is_masked = torch.from_numpy(~is_allowed).to(logits.device)
    at_rows = torch.tensor(rows, device=logits.device)
    logits[at_rows] = logits[at_rows].masked_fill(is_masked, -torch.inf)


def _allowed(slot: SampleSlot, vocab_size: int) -> "np.typing.NDArray[np.bool_]":
    assert slot.allowed_tokens is not None
    bits = np.unpackbits(np.frombuffer(slot.allowed_tokens, dtype=np.uint8), bitorder="little")[:vocab_size]
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[: len(bits)] = bits
    unsuppressed = allowed.copy()
    unsuppressed[[token_id for token_id in slot.suppressed_token_ids if 0 <= token_id < vocab_size]] = False
    return unsuppressed if unsuppressed.any() else allowed
