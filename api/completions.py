"""POST /v1/completions."""

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from radixserve.api.body import decode_body, read_body
from radixserve.api.echo import Echo, echo_of
from radixserve.api.generation import Generation
from radixserve.api.generation_response import GenerationResponse
from radixserve.api.logprobs import CompletionLogprobsWriter, join, prompt_logprobs
from radixserve.api.options import includes_usage, namespace_of
from radixserve.api.output_format import output_grammar
from radixserve.api.prompts import BudgetFields, encode_prompts, fit_budget, split_prompts, truncate
from radixserve.api.records import record_of
from radixserve.api.requests import CompletionRequest
from radixserve.api.responses import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from radixserve.api.sampling import budget_field, completion_sampling_params
from radixserve.api.service import HeadFields, Service, service_of
from radixserve.engine.answer import Answer
from radixserve.protocol import Delta, EngineReady, TokenLogprobs
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
    params = completion_sampling_params(request, output_grammar(request, service.grammars))
    namespace = namespace_of(tenant, request.cache_salt)
    usage_is_included = includes_usage(request)
    tokenizer = service.engine.tokenizer
    texts = split_prompts(request.prompt)
    is_given = request.max_tokens is not None or request.max_completion_tokens is not None
    prompts = [
        truncate(
            token_ids, request.truncate_prompt_tokens, ready.max_model_len, params.max_tokens if is_given else None
        )
        for token_ids in encode_prompts(texts, tokenizer, ready.vocab_size)
    ]
    fields = BudgetFields(prompt="prompt", budget=budget_field(request), clamp=not is_given)
    params = fit_budget(prompts, params, ready.max_model_len, fields)
    is_continued = params.max_tokens != 0
    return Generation(
        prompts=prompts,
        params=params,
        namespace=namespace,
        is_streamed=request.stream or False,
        includes_usage=usage_is_included,
        returns_token_ids=request.return_token_ids or False,
        priority=request.priority or 0,
        num_prompt_logprobs=request.prompt_logprobs,
        echoes=tuple(
            echo_of(text, token_ids, tokenizer, is_continued=is_continued)
            for text, token_ids in zip(texts, prompts, strict=True)
            if request.echo
        ),
    )


class CompletionFormat:
    """The JSON of a completion."""

    def __init__(self, head: HeadFields, generation: Generation, tokenizer: Tokenizer) -> None:
        self._head = head
        self._generation = generation
        params = generation.params
        # In the order of the choices: those of one prompt lie together.
        self._writers = [
            CompletionLogprobsWriter(tokenizer, prompt, params)
            for prompt in generation.prompts
            for _ in range(params.n if params.logprobs is not None else 0)
        ]
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._prompt_entries: dict[int, list[TokenLogprobs | None]] = {}

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        """Return a chunk; the first of each choice tells of its prompt, the first of all carries the prompts' ids."""
        generation = self._generation
        is_first = index not in self._begun
        tells_of_prompt = is_first and (generation.echoes or generation.num_prompt_logprobs is not None)
        if not (delta.text or delta.logprobs or delta.finish_reason or generation.returns_token_ids or tells_of_prompt):
            return None
        prompt_token_ids = UNSET if self._begun else self._prompt_token_ids()
        choice = self._choice(index, delta)
        usage = None if generation.includes_usage else UNSET
        return msgspec.json.encode(
            Completion(**self._head, choices=[choice], usage=usage, prompt_token_ids=prompt_token_ids)
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk without choices that ends a stream."""
        return msgspec.json.encode(Completion(**self._head, choices=[], usage=usage))

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """Return the whole answer."""
        written = [self._choice(answer.index, answer) for answer in answers]
        return msgspec.json.encode(
            Completion(**self._head, choices=written, usage=usage, prompt_token_ids=self._prompt_token_ids())
        )

    def _choice(self, index: int, piece: Delta | Answer) -> CompletionChoice:
        """Return the next piece of a choice, or all of it; the first one begins with what tells of the prompt."""
        generation = self._generation
        prompt_index = index // generation.params.n
        if piece.prompt_logprobs is not None:
            self._prompt_entries[prompt_index] = piece.prompt_logprobs
        is_first = index not in self._begun
        self._begun.add(index)
        echo = generation.echoes[prompt_index] if generation.echoes and is_first else None
        return CompletionChoice(
            index=index,
            text=piece.text if echo is None else echo.text + piece.text,
            logprobs=self._logprobs(index, piece.logprobs, echo),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason if piece.finish_reason else UNSET,
            token_ids=piece.token_ids if generation.returns_token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(prompt_index) if is_first else UNSET,
        )

    def _prompt_logprobs(self, prompt_index: int) -> PromptLogprobs | UnsetType:
        count = self._generation.num_prompt_logprobs
        if count is None:
            return UNSET
        return prompt_logprobs(self._prompt_entries[prompt_index], count, self._tokenizer)

    def _prompt_token_ids(self) -> list[int] | list[list[int]] | UnsetType:
        if not self._generation.returns_token_ids:
            return UNSET
        prompts = self._generation.prompts
        return prompts[0] if len(prompts) == 1 else prompts

    def _logprobs(
        self, index: int, entries: list[TokenLogprobs] | None, echo: Echo | None
    ) -> CompletionLogprobs | None:
        params = self._generation.params
        if params.logprobs is None:
            return None
        writer = self._writers[index]
        if echo is None:
            return writer.write(entries or [])
        echoed = writer.write_echo(echo, self._prompt_entries[index // params.n])
        return join(echoed, writer.write(entries or []))
