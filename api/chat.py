"""POST /v1/chat/completions."""

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from radixserve.api.beam_params import beam_search_params, is_beam_search
from radixserve.api.body import decode_body, read_body
from radixserve.api.generation import Generation
from radixserve.api.generation_response import GenerationResponse
from radixserve.api.logprobs import chat_logprobs
from radixserve.api.messages import encode_messages
from radixserve.api.options import includes_usage, namespace_of
from radixserve.api.prompts import BudgetFields, fit_budget
from radixserve.api.records import record_of
from radixserve.api.requests import ChatRequest
from radixserve.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from radixserve.api.sampling import budget_field, chat_sampling_params, max_tokens_of
from radixserve.api.service import HeadFields, Service, service_of
from radixserve.beam_search_params import BeamSearchParams
from radixserve.engine.answer import Answer
from radixserve.errors import InvalidRequest
from radixserve.protocol import Delta, EngineReady, TokenLogprobs
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer


async def chat_completions(request: Request) -> GenerationResponse:
    """Answer a conversation."""
    service = service_of(request)
    ready = service.ready()
    body = await read_body(request)
    tenant = record_of(request.scope).tenant
    generation = await service.run_in_worker(_prepare, body, service, ready, tenant)
    return GenerationResponse(
        service, generation, ChatFormat(service.new_head("chatcmpl", ready), generation, service.engine.tokenizer)
    )


def _prepare(body: bytes, service: Service, ready: EngineReady, tenant: str | None) -> Generation:
    """Check a request and turn it into token ids. Slow for long texts: off the event loop."""
    request = decode_body(body, ChatRequest, service.field_check)
    service.check_model(request.model, ready)
    params: SamplingParams | BeamSearchParams = (
        beam_search_params(
            request,
            default_n=1,
            max_tokens=max_tokens_of(request),
            max_num_seqs=service.engine.config.max_num_seqs,
        )
        if is_beam_search(request)
        else chat_sampling_params(request)
    )
    namespace = namespace_of(tenant, request.cache_salt)
    usage_is_included = includes_usage(request)
    answers = service.answer_memory.lookup(namespace)
    prompt = encode_messages(request.messages, request, service.engine.tokenizer, answers)
    if not prompt:
        raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
    fields = BudgetFields(prompt="messages", budget=budget_field(request), clamp=True)
    return Generation(
        prompts=[prompt],
        params=fit_budget([prompt], params, ready.max_model_len, fields),
        namespace=namespace,
        is_streamed=request.stream or False,
        includes_usage=usage_is_included,
        returns_token_ids=request.return_token_ids or False,
        priority=request.priority or 0,
        is_chat=True,
    )


class ChatFormat:
    """The JSON of a chat answer."""

    def __init__(self, head: HeadFields, generation: Generation, tokenizer: Tokenizer) -> None:
        self._head = head
        self._generation = generation
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        """Return a chunk; the first of each choice names the role, the first of all the prompt's ids if wanted."""
        returns_token_ids = self._generation.returns_token_ids
        is_first = index not in self._begun
        if not (is_first or delta.text or delta.logprobs or delta.finish_reason or returns_token_ids):
            return None
        is_first_of_all = not self._begun
        self._begun.add(index)
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(
                role="assistant" if is_first else UNSET, content=delta.text if delta.text or is_first else UNSET
            ),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
            token_ids=delta.token_ids if returns_token_ids else UNSET,
        )
        return msgspec.json.encode(
            ChatChunk(
                **self._head,
                choices=[choice],
                usage=None if self._generation.includes_usage else UNSET,
                prompt_token_ids=self._generation.prompts[0] if returns_token_ids and is_first_of_all else UNSET,
            )
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk without choices that ends a stream."""
        return msgspec.json.encode(ChatChunk(**self._head, choices=[], usage=usage))

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """Return the whole answer."""
        returns_token_ids = self._generation.returns_token_ids
        return msgspec.json.encode(
            ChatCompletion(
                **self._head,
                choices=[
                    ChatChoice(
                        index=answer.index,
                        message=ChatMessage("assistant", answer.text),
                        logprobs=self._logprobs(answer.logprobs),
                        finish_reason=answer.finish_reason,
                        stop_reason=answer.stop_reason,
                        token_ids=answer.token_ids if returns_token_ids else UNSET,
                    )
                    for answer in answers
                ],
                usage=usage,
                prompt_token_ids=self._generation.prompts[0] if returns_token_ids else UNSET,
            )
        )

    def _logprobs(self, entries: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        if self._generation.num_logprobs is None:
            return None
        return chat_logprobs(entries or [], self._tokenizer)
