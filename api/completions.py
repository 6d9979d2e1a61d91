"""POST /v1/completions."""

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from radixserve.api.beam_params import beam_search_params, is_beam_search
from radixserve.api.echo import Echo, echo_of
from radixserve.api.explain import diagnose_prompts
from radixserve.api.generation import Generation
from radixserve.api.generation_response import GenerationResponse
from radixserve.api.incoming import Incoming, receive
from radixserve.api.logprobs import CompletionLogprobsWriter, join, prompt_logprobs
from radixserve.api.options import includes_usage, namespace_of
from radixserve.api.output_format import output_grammar
from radixserve.api.prompts import MAX_PROMPTS, BudgetFields, encode_prompts, fit_budget, split_prompts, truncate
from radixserve.api.requests import CompletionRequest
from radixserve.api.responses import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from radixserve.api.retention import read_retention
from radixserve.api.sampling import budget_field, completion_max_tokens, completion_sampling_params
from radixserve.api.service import HeadFields
from radixserve.beam_search_params import BeamSearchParams
from radixserve.diagnosis.prompt import DiagnosedPrompt
from radixserve.diagnosis.report import Diagnosis
from radixserve.engine.answer import Answer
from radixserve.protocol import Delta, TokenLogprobs
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer


async def completions(request: Request) -> GenerationResponse:
    """Continue one or more prompts."""
    incoming = await receive(request)
    generation = await incoming.in_worker(_prepare)
    service = incoming.service
    diagnoses = await diagnose_prompts(service, generation.diagnosed, generation.namespace)
    head = service.new_head("cmpl", incoming.ready)
    answer_format = CompletionFormat(head, generation, service.engine.tokenizer, diagnoses)
    return GenerationResponse(service, generation, answer_format)


def _prepare(incoming: Incoming) -> Generation:
    """Check a request and turn it into token ids. Slow for long texts: off the event loop."""
    service, ready = incoming.service, incoming.ready
    request = incoming.decode(CompletionRequest)
    params: SamplingParams | BeamSearchParams = (
        beam_search_params(
            request,
            default_n=1,
            max_tokens=completion_max_tokens(request),
            max_num_seqs=service.engine.config.max_num_seqs,
        )
        if is_beam_search(request)
        else completion_sampling_params(request, output_grammar(request, service.grammars))
    )
    retention = read_retention(
        request,
        has_prefix_cache=not service.engine.config.no_prefix_cache,
        is_beam_search=isinstance(params, BeamSearchParams),
    )
    namespace = namespace_of(incoming, request.cache_salt)
    usage_is_included = includes_usage(request)
    tokenizer = service.engine.tokenizer
    # A list is answered as a whole, so it must fit the queue as a whole.
    texts = split_prompts(request.prompt, min(MAX_PROMPTS, service.engine.config.max_queued_requests))
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
        diagnosed=tuple(DiagnosedPrompt(token_ids, None) for token_ids in prompts if request.cache_diagnostics),
        pins=[retention.pins(len(prompt)) for prompt in prompts],
    )


class CompletionFormat:
    """The JSON of a completion. diagnoses: one of each prompt, if they are wanted."""

    def __init__(
        self, head: HeadFields, generation: Generation, tokenizer: Tokenizer, diagnoses: list[Diagnosis]
    ) -> None:
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
        self._diagnoses = diagnoses
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
        diagnostics = UNSET if self._begun else self._cache_diagnostics()
        choice = self._choice(index, delta)
        return msgspec.json.encode(
            Completion(
                **self._head,
                choices=[choice],
                usage=None if generation.includes_usage else UNSET,
                prompt_token_ids=prompt_token_ids,
                cache_diagnostics=diagnostics,
            )
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk without choices that ends a stream."""
        return msgspec.json.encode(Completion(**self._head, choices=[], usage=usage))

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """Return the whole answer."""
        written = [self._choice(answer.index, answer) for answer in answers]
        return msgspec.json.encode(
            Completion(
                **self._head,
                choices=written,
                usage=usage,
                prompt_token_ids=self._prompt_token_ids(),
                cache_diagnostics=self._cache_diagnostics(),
            )
        )

    def _choice(self, index: int, piece: Delta | Answer) -> CompletionChoice:
        """Return the next piece of a choice, or all of it; the first one begins with what tells of the prompt."""
        generation = self._generation
        prompt_index = index // generation.params.num_returned
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

    def _cache_diagnostics(self) -> Diagnosis | list[Diagnosis] | UnsetType:
        if not self._diagnoses:
            return UNSET
        return self._diagnoses[0] if len(self._diagnoses) == 1 else self._diagnoses

    def _logprobs(
        self, index: int, entries: list[TokenLogprobs] | None, echo: Echo | None
    ) -> CompletionLogprobs | None:
        if self._generation.num_logprobs is None:
            return None
        writer = self._writers[index]
        if echo is None:
            return writer.write(entries or [])
        echoed = writer.write_echo(echo, self._prompt_entries[index // self._generation.params.num_returned])
        return join(echoed, writer.write(entries or []))
