"""POST /v1/beam_search."""

from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.api.beam_params import beam_search_params
from radixserve.api.disconnect import cancelled_on_disconnect
from radixserve.api.generation import Generation, UsageCounter, generate
from radixserve.api.incoming import Incoming, receive
from radixserve.api.messages import encode_messages
from radixserve.api.options import namespace_of
from radixserve.api.prompts import BudgetFields, check_prompt_or_messages, encode_prompts, fit_budget
from radixserve.api.records import record_of
from radixserve.api.requests import BeamSearchRequest
from radixserve.api.responses import AnswerHead, Usage
from radixserve.api.sampling import budget_field, completion_max_tokens, max_tokens_of
from radixserve.api.service import HeadFields, Service
from radixserve.errors import InvalidRequest
from radixserve.protocol import Delta, FinishReason
from radixserve.tokenizer.messages import refuse_marked_parts


class BeamChoice(msgspec.Struct, frozen=True):
    """One hypothesis. score: cumulative_logprob / generated length ** length_penalty."""

    index: int
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class BeamMemoryReport(msgspec.Struct, frozen=True):
    """The K/V blocks of the search, as radixserve.protocol.BeamMemory has them."""

    block_size: int
    peak_blocks: int
    peak_blocks_without_sharing: int
    blocks_copied: int


class BeamSearchResult(AnswerHead, frozen=True, kw_only=True):
    """What was found, best first."""

    object: Literal["beam_search"] = "beam_search"
    choices: list[BeamChoice]
    usage: Usage
    memory: BeamMemoryReport
    prompt_token_ids: list[int] | UnsetType = UNSET


async def beam_search(request: Request) -> "BeamSearchResponse":
    """Search for the most likely continuations of a prompt or a conversation."""
    incoming = await receive(request)
    generation = await incoming.in_worker(_prepare)
    return BeamSearchResponse(incoming.service, generation, incoming.service.new_head("beam", incoming.ready))


def _prepare(incoming: Incoming) -> Generation:
    """Check a request and turn it into token ids. Slow for long texts: off the event loop."""
    service, ready = incoming.service, incoming.ready
    request = incoming.decode(BeamSearchRequest)
    check_prompt_or_messages(request.prompt, request.messages)
    if request.use_beam_search is False:
        raise InvalidRequest("this route is beam search; leave use_beam_search out", param="use_beam_search")
    if request.beam_width is None:
        raise InvalidRequest("beam_width is missing; it says how many hypotheses are kept", param="beam_width")
    # The budget of a chat is a bound, and so is the one that a completion has by default.
    is_chat = request.messages is not None
    params = beam_search_params(
        request,
        default_n=None,
        max_tokens=max_tokens_of(request) if is_chat else completion_max_tokens(request),
        max_num_seqs=service.engine.config.max_num_seqs,
    )
    namespace = namespace_of(incoming, request.cache_salt)
    tokenizer = service.engine.tokenizer
    if request.messages is not None:
        refuse_marked_parts(request.messages, "together with beam search")
        prompts = [
            encode_messages(request.messages, request, tokenizer, answers=service.answer_memory.lookup(namespace))
        ]
    else:
        prompts = encode_prompts([request.prompt or ""], tokenizer, ready.vocab_size)
    fields = BudgetFields(
        prompt="messages" if is_chat else "prompt",
        budget=budget_field(request),
        clamp=is_chat or max_tokens_of(request) is None,
    )
    return Generation(
        prompts=prompts,
        params=fit_budget(prompts, params, ready.max_model_len, fields),
        namespace=namespace,
        is_streamed=False,
        includes_usage=False,
        returns_token_ids=request.return_token_ids or False,
        priority=request.priority or 0,
        is_chat=is_chat,
    )


class BeamSearchResponse:
    """An ASGI response that searches while its client waits, and aborts the search when the client goes away."""

    def __init__(self, service: Service, generation: Generation, head: HeadFields) -> None:
        self._service = service
        self._generation = generation
        self._head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Search and send. Raises RequestError."""
        record = record_of(scope)
        usage = UsageCounter(self._generation.prompts)
        recorder = self._service.answer_recorder(self._generation)
        try:
            async with cancelled_on_disconnect(receive):
                hypotheses = []
                async with aclosing(generate(self._service.engine, self._generation, record.request_id)) as deltas:
                    async for prompt_index, delta in deltas:
                        usage.add(prompt_index, delta)
                        hypotheses.append(delta)
                        if recorder is not None:
                            recorder.add(delta)
                body = self._body(hypotheses, usage.usage())
                await Response(body, media_type="application/json")(scope, receive, send)
        finally:
            record.usage = usage.usage()

    def _body(self, hypotheses: list[Delta], usage: Usage) -> bytes:
        returns_token_ids = self._generation.returns_token_ids
        memory = hypotheses[0].beam_memory
        assert memory is not None
        return msgspec.json.encode(
            BeamSearchResult(
                **self._head,
                choices=[_choice(hypothesis, returns_token_ids) for hypothesis in hypotheses],
                usage=usage,
                memory=BeamMemoryReport(*msgspec.structs.astuple(memory)),
                prompt_token_ids=self._generation.prompts[0] if returns_token_ids else UNSET,
            )
        )


def _choice(hypothesis: Delta, returns_token_ids: bool) -> BeamChoice:
    assert hypothesis.beam is not None
    return BeamChoice(
        index=hypothesis.index,
        text=hypothesis.text,
        cumulative_logprob=hypothesis.beam.cumulative_logprob,
        score=hypothesis.beam.score,
        finish_reason=hypothesis.finish_reason,
        stop_reason=hypothesis.stop_reason,
        token_ids=hypothesis.token_ids if returns_token_ids else UNSET,
    )
