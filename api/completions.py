"""POST /v1/completions."""

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from radixserve.api.beam_params import beam_search_params, is_beam_search
from radixserve.api.body import decode_body, read_body
from radixserve.api.generation import Generation
from radixserve.api.generation_response import GenerationResponse
from radixserve.api.logprobs import CompletionLogprobsWriter
from radixserve.api.options import includes_usage, namespace_of
from radixserve.api.prompts import BudgetFields, encode_prompts, fit_budget, split_prompts
from radixserve.api.records import record_of
from radixserve.api.requests import CompletionRequest
from radixserve.api.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from radixserve.api.sampling import budget_field, completion_max_tokens, completion_sampling_params
from radixserve.api.service import HeadFields, Service, service_of
from radixserve.beam_search_params import BeamSearchParams
from radixserve.engine.answer import Answer
from radixserve.protocol import Delta, EngineReady, TokenLogprobs
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer


async def completions(request: Request) -> GenerationResponse:
    """Continue one or more prompts."""
    service = service_of(request)
    ready = service.ready()
    body = await read_body(request)
    tenant = record_of(request.scope).tenant
    generation = await service.run_in_worker(_prepare, body, service, ready, tenant)
    answer_format = CompletionFormat(service.new_head("cmpl", ready), generation, service.engine.tokenizer)
    return GenerationResponse(service, generation, answer_format)


def _prepare(body: bytes, service: Service, ready: EngineReady, tenant: str | None) -> Generation:
    """Check a request and turn it into token ids. Slow for long texts: off the event loop."""
    request = decode_body(body, CompletionRequest, service.field_check)
    service.check_model(request.model, ready)
    params: SamplingParams | BeamSearchParams = (
        beam_search_params(
            request,
            default_n=1,
            max_tokens=completion_max_tokens(request),
            max_num_seqs=service.engine.config.max_num_seqs,
        )
        if is_beam_search(request)
        else completion_sampling_params(request)
    )
    namespace = namespace_of(tenant, request.cache_salt)
    usage_is_included = includes_usage(request)
    prompts = encode_prompts(split_prompts(request.prompt), service.engine.tokenizer, ready.vocab_size)
    is_given = request.max_tokens is not None or request.max_completion_tokens is not None
    fields = BudgetFields(prompt="prompt", budget=budget_field(request), clamp=not is_given)
    return Generation(
        prompts=prompts,
        params=fit_budget(prompts, params, ready.max_model_len, fields),
        namespace=namespace,
        is_streamed=request.stream or False,
        includes_usage=usage_is_included,
        returns_token_ids=request.return_token_ids or False,
        priority=request.priority or 0,
    )


class CompletionFormat:
    """The JSON of a completion."""

    def __init__(self, head: HeadFields, generation: Generation, tokenizer: Tokenizer) -> None:
        self._head = head
        self._generation = generation
        params = generation.params
        self._writers: list[CompletionLogprobsWriter] = []
        if isinstance(params, SamplingParams) and params.logprobs is not None:
            # In the order of the choices: those of one prompt lie together.
            self._writers = [
                CompletionLogprobsWriter(tokenizer, prompt, params)
                for prompt in generation.prompts
                for _ in range(params.n)
            ]
        self._has_begun = False

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        """Return a chunk; the first of all carries the prompt's ids if they are wanted."""
        returns_token_ids = self._generation.returns_token_ids
        if not (delta.text or delta.logprobs or delta.finish_reason or returns_token_ids):
            return None
        choice = CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=self._logprobs(index, delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
            token_ids=delta.token_ids if returns_token_ids else UNSET,
        )
        prompt_token_ids = UNSET if self._has_begun else self._prompt_token_ids()
        self._has_begun = True
        usage = None if self._generation.includes_usage else UNSET
        return msgspec.json.encode(
            Completion(**self._head, choices=[choice], usage=usage, prompt_token_ids=prompt_token_ids)
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk without choices that ends a stream."""
        return msgspec.json.encode(Completion(**self._head, choices=[], usage=usage))

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """Return the whole answer."""
        written = [
            CompletionChoice(
                index=answer.index,
                text=answer.text,
                logprobs=self._logprobs(answer.index, answer.logprobs),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                token_ids=answer.token_ids if self._generation.returns_token_ids else UNSET,
            )
            for answer in answers
        ]
        return msgspec.json.encode(
            Completion(**self._head, choices=written, usage=usage, prompt_token_ids=self._prompt_token_ids())
        )

    def _prompt_token_ids(self) -> list[int] | list[list[int]] | UnsetType:
        if not self._generation.returns_token_ids:
            return UNSET
        prompts = self._generation.prompts
        return prompts[0] if len(prompts) == 1 else prompts

    def _logprobs(self, index: int, entries: list[TokenLogprobs] | None) -> CompletionLogprobs | None:
        if self._generation.num_logprobs is None:
            return None
        return self._writers[index].write(entries or [])
