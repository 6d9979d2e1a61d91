"""Beam searches on their way in and out of the engine: limits, the group, and the answers."""

from array import array

from radixserve.beam_search_params import BeamSearchParams
from radixserve.core.beam import BeamGroup
from radixserve.core.beam_members import most_new_tokens
from radixserve.core.kv_cache import KVCache
from radixserve.core.scheduler import SchedulerLimits
from radixserve.core.sequence import Request
from radixserve.engine.detokenizer import Detokenizer
from radixserve.protocol import BeamScore, Delta, Failure
from radixserve.tokenizer.tokenizer import Tokenizer


class BeamRequests:
    """Checks beam searches, makes their groups, and tells their answers."""

    def __init__(self, tokenizer: Tokenizer, cache: KVCache, limits: SchedulerLimits) -> None:
        self._tokenizer = tokenizer
        self._cache = cache
        self._limits = limits

    def reason_to_refuse(self, params: BeamSearchParams, num_prompt_tokens: int) -> Failure | None:
        """Return what is wrong with a search that could not run to its end on this engine, even alone."""
        width = params.beam_width
        # With so many tokens to begin with there are always enough beams, also where end tokens are suppressed.
        num_beginnings = self._tokenizer.vocab_size - len(self._limits.end_token_ids.union(params.stop_token_ids))
        limit = min(self._limits.max_num_seqs, num_beginnings)
        if width > limit:
            text = f"beam_width is {width}; this server computes at most {limit} beams at once"
            return Failure("invalid_request", text, param="beam_width")
        room = self._room(width, num_prompt_tokens)
        pool = f"the {self._cache.num_blocks} K/V blocks of {self._cache.block_size} tokens that this server has"
        if room < 1:
            text = f"{width} beams of a prompt of {num_prompt_tokens} tokens do not fit {pool}; lower beam_width"
            return Failure("invalid_request", text, param="beam_width")
        if params.max_tokens is not None and params.max_tokens > room < self._limits.max_model_len - num_prompt_tokens:
            text = f"max_tokens is {params.max_tokens}; {width} beams of this prompt have at most {room} each in {pool}"
            return Failure("invalid_request", text, param="max_tokens")
        return None

    def group(self, params: BeamSearchParams, prompt_token_ids: "array[int]") -> BeamGroup:
        """Return the group of a search that was not refused, with its one beginning."""
        room = self._room(params.beam_width, len(prompt_token_ids))
        return BeamGroup(
            params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            end_token_ids=self._limits.end_token_ids,
            text=Detokenizer(self._tokenizer, prompt_token_ids, params.sampling_params()) if params.stop else None,
        )

    def deltas(self, request: Request) -> list[Delta]:
        """Return one delta for each hypothesis that a finished search returns, the best first.

        token_ids hold all that was generated; an end token and, unless the caller wants it, a stop string are cut from
        the text.
        """
        group = request.beam
        assert group is not None
        prompt = request.sequences[0].token_ids[: request.num_prompt_tokens]
        memory = group.memory(self._cache.block_size)
        deltas = []
        for index, hypothesis in enumerate(group.returned):
            detokenizer = Detokenizer(self._tokenizer, prompt, request.params)
            has_end_token = hypothesis.finish_reason == "stop" and not isinstance(hypothesis.stop_reason, str)
            text = detokenizer.push(hypothesis.token_ids.tolist(), is_end_token=has_end_token)
            deltas.append(
                Delta(
                    request_id=request.request_id,
                    index=index,
                    text=text + detokenizer.flush(),
                    token_ids=hypothesis.token_ids.tolist(),
                    num_cached_tokens=request.num_cached_tokens or 0,
                    finish_reason=hypothesis.finish_reason,
                    stop_reason=hypothesis.stop_reason,
                    beam=BeamScore(hypothesis.cumulative_logprob, hypothesis.score),
                    beam_memory=memory,
                )
            )
        return deltas

    def _room(self, beam_width: int, num_prompt_tokens: int) -> int:
        """Return how many tokens each beam may have, within the context and, at worst, the pool."""
        room = most_new_tokens(beam_width, num_prompt_tokens, self._cache)
        return min(room, self._limits.max_model_len - num_prompt_tokens)
