"""The sequences of a beam group: the blocks they need, how they fork, and the order in which they come back."""

from itertools import pairwise

from radixserve.core.beam import Child
from radixserve.core.kv_cache import KVCache
from radixserve.core.sequence import Request, Sequence, SequenceStatus


def most_new_tokens(beam_width: int, num_prompt_tokens: int, cache: KVCache) -> int:
    """Return how many tokens each beam can surely have on the cache's pool; 0 or less if none.

    In the worst case the beams share only the prompt's full blocks, and each copies a block in one step. Without a
    prefix cache they share not even these, once they were preempted. The last token of a beam needs no K/V.
    """
    block_size = cache.block_size
    num_shared_blocks = num_prompt_tokens // block_size if cache.shares_prefixes else 0
    num_own_blocks = (cache.num_blocks - num_shared_blocks) // beam_width - 1
    return (num_shared_blocks + num_own_blocks) * block_size + 1 - num_prompt_tokens


def num_blocks_wanted(request: Request, block_size: int) -> int:
    """Return how many blocks hold all tokens of a request's beams, which share what they can, and the next of each."""
    assert request.beam is not None
    ordered = sorted(request.sequences, key=_output)
    num_blocks = sum(-(-member.num_tokens // block_size) for member in ordered)
    num_shared = sum(_num_common_tokens(*pair) // block_size for pair in pairwise(ordered))
    return num_blocks - num_shared + request.beam.width


def resume_order(members: list[Sequence]) -> list[Sequence]:
    """Return the members in the order in which they are computed again, those with the deepest shared run first."""
    ordered = sorted(members, key=_output)
    common = [0, *(_num_common_tokens(*pair) for pair in pairwise(ordered)), 0]
    depths = {member: max(around) for member, around in zip(ordered, pairwise(common), strict=True)}
    return sorted(ordered, key=lambda member: -depths[member])


def count_blocks(members: list[Sequence], block_size: int) -> tuple[int, int]:
    """Return how many blocks members hold together, and how many they would hold if they shared none."""
    num_distinct = len({block_id for member in members for block_id in member.block_table})
    return num_distinct, sum(-(-member.num_computed_tokens // block_size) for member in members)


def fork_and_release(request: Request, children: list[Child], cache: KVCache) -> None:
    """Make request.sequences those of the children, in their order, each with its token. All are running.

    A beam's first child goes on in its sequence, further ones in forks of it. All forks come before any release and
    any token, so each child begins where its parent ended, and what they share is never without a holder.
    """
    parents = request.sequences
    members: list[Sequence] = []
    heirs: set[Sequence] = set()
    for child in children:
        member = parents[child.parent]
        if member in heirs:
            parent, member = member, Sequence(request, 0, member.token_ids[:], status=SequenceStatus.RUNNING)
            cache.fork(parent, member)
        heirs.add(member)
        members.append(member)
    for parent in parents:
        if parent not in heirs:
            cache.release(parent)
            parent.status = SequenceStatus.FINISHED
    for member, child in zip(members, children, strict=True):
        member.token_ids.append(child.token_id)
    request.sequences = members


def _output(member: Sequence) -> list[int]:
    return member.token_ids[member.request.num_prompt_tokens :].tolist()


def _num_common_tokens(left: Sequence, right: Sequence) -> int:
    """Return how many leading tokens two beams of a request, equally long, have in common."""
    pairs = enumerate(zip(_output(left), _output(right), strict=True))
    num_output_tokens = next((index for index, (one, other) in pairs if one != other), left.num_output_tokens)
    return left.request.num_prompt_tokens + num_output_tokens
