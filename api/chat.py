"""POST /v1/chat/completions."""

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from radixserve.api.answer_reader import AnswerReader, chunk_delta, whole_message
from radixserve.api.beam_params import beam_search_params, is_beam_search
from radixserve.api.explain import chat_prompt, diagnose_prompts
from radixserve.api.generation import Generation
from radixserve.api.generation_response import GenerationResponse
from radixserve.api.incoming import Incoming, receive
from radixserve.api.logprobs import chat_logprobs, prompt_logprobs
from radixserve.api.messages import encode_messages_with_ends
from radixserve.api.options import includes_usage, namespace_of
from radixserve.api.output_format import output_grammar
from radixserve.api.prompts import BudgetFields, fit_budget, truncate
from radixserve.api.requests import ChatRequest
from radixserve.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    PromptLogprobs,
    Usage,
)
from radixserve.api.retention import read_retention
from radixserve.api.sampling import budget_field, chat_sampling_params, max_tokens_of
from radixserve.api.service import HeadFields, Service
from radixserve.api.tools import ToolUse, check_tool_format, read_tool_use
from radixserve.beam_search_params import BeamSearchParams
from radixserve.diagnosis.report import Diagnosis
from radixserve.engine.answer import Answer
from radixserve.protocol import Delta, TokenLogprobs
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.tokenizer import Tokenizer
from radixserve.tokenizer.tools import template_tools


async def chat_completions(request: Request) -> GenerationResponse:
    """Answer a conversation."""
    incoming = await receive(request)
    generation = await incoming.in_worker(_prepare)
    service = incoming.service
    diagnoses = await diagnose_prompts(service, generation.diagnosed, generation.namespace)
    head = service.new_head("chatcmpl", incoming.ready)
    return GenerationResponse(service, generation, ChatFormat(head, generation, service.engine.tokenizer, diagnoses))


def _prepare(incoming: Incoming) -> Generation:
    """Check a request and turn it into token ids. Slow for long texts: off the event loop."""
    service, ready = incoming.service, incoming.ready
    request = incoming.decode(ChatRequest)
    tool_use = read_tool_use(request)
    params = _params(request, tool_use, service)
    retention = read_retention(
        request,
        request.messages,
        has_prefix_cache=not service.engine.config.no_prefix_cache,
        is_beam_search=isinstance(params, BeamSearchParams),
    )
    namespace = namespace_of(incoming, request.cache_salt)
    usage_is_included = includes_usage(request)
    tools = None if tool_use is None else template_tools(tool_use.functions)
    answers = service.answer_memory.lookup(namespace)
    tokenizer = service.engine.tokenizer
    prompt, end_positions = encode_messages_with_ends(
        request.messages, request, tokenizer, retention.ends, tools, answers
    )
    prompt = truncate(prompt, request.truncate_prompt_tokens, ready.max_model_len, params.max_tokens)
    diagnosed = (
        (chat_prompt(prompt, request, request.messages, tokenizer, tools, answers),)
        if request.cache_diagnostics
        else ()
    )
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
        tool_use=tool_use,
        num_prompt_logprobs=request.prompt_logprobs,
        pins=[retention.pins(len(prompt), end_positions)],
        diagnosed=diagnosed,
    )


def _params(request: ChatRequest, tool_use: ToolUse | None, service: Service) -> SamplingParams | BeamSearchParams:
    if is_beam_search(request):
        max_num_seqs = service.engine.config.max_num_seqs
        return beam_search_params(request, default_n=1, max_tokens=max_tokens_of(request), max_num_seqs=max_num_seqs)
    params = chat_sampling_params(request, output_grammar(request, service.grammars))
    if tool_use is None:
        return params
    tokenizer = service.engine.tokenizer
    check_tool_format(service.engine.config.tool_call_parser, tokenizer)
    return tool_use.apply_to(params, tokenizer, service.grammars)


class ChatFormat:
    """The JSON of a chat answer. diagnoses: that of the prompt, if it is wanted."""

    def __init__(
        self, head: HeadFields, generation: Generation, tokenizer: Tokenizer, diagnoses: list[Diagnosis]
    ) -> None:
        self._head = head
        self._generation = generation
        self._tokenizer = tokenizer
        self._diagnosis = diagnoses[0] if diagnoses else UNSET
        self._readers: dict[int, AnswerReader] = {}

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        """Return a chunk; the first of each choice names the role, the first of all the prompt's ids if wanted."""
        returns_token_ids = self._generation.returns_token_ids
        is_first_of_all = not self._readers
        is_first = index not in self._readers
        if is_first:
            self._readers[index] = self._new_reader()
        reader = self._readers[index]
        parsed = reader.read(delta.text, delta.finish_reason)
        says_something = is_first or parsed.content or parsed.calls or delta.logprobs or parsed.finish_reason
        if not (says_something or returns_token_ids):
            return None
        choice = ChatChunkChoice(
            index=index,
            delta=chunk_delta(parsed, reader, is_first=is_first),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=parsed.finish_reason,
            stop_reason=reader.stop_reason(delta.stop_reason) if delta.finish_reason else UNSET,
            token_ids=delta.token_ids if returns_token_ids else UNSET,
        )
        return msgspec.json.encode(
            ChatChunk(
                **self._head,
                choices=[choice],
                usage=None if self._generation.includes_usage else UNSET,
                prompt_token_ids=self._generation.prompts[0] if returns_token_ids and is_first_of_all else UNSET,
                prompt_logprobs=self._prompt_logprobs(delta.prompt_logprobs),
                cache_diagnostics=self._diagnosis if is_first_of_all else UNSET,
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
                choices=[self._choice(answer) for answer in answers],
                usage=usage,
                prompt_token_ids=self._generation.prompts[0] if returns_token_ids else UNSET,
                prompt_logprobs=self._prompt_logprobs(answers[0].prompt_logprobs),
                cache_diagnostics=self._diagnosis,
            )
        )

    def _choice(self, answer: Answer) -> ChatChoice:
        reader = self._new_reader()
        parsed = reader.read(answer.text, answer.finish_reason)
        return ChatChoice(
            index=answer.index,
            message=whole_message(parsed),
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=parsed.finish_reason,
            stop_reason=reader.stop_reason(answer.stop_reason),
            token_ids=answer.token_ids if self._generation.returns_token_ids else UNSET,
        )

    def _new_reader(self) -> AnswerReader:
        return AnswerReader(self._generation.tool_use, self._tokenizer)

    def _prompt_logprobs(self, entries: list[TokenLogprobs | None] | None) -> PromptLogprobs | UnsetType:
        count = self._generation.num_prompt_logprobs
        return UNSET if entries is None or count is None else prompt_logprobs(entries, count, self._tokenizer)

    def _logprobs(self, entries: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        if self._generation.num_logprobs is None:
            return None
        return chat_logprobs(entries or [], self._tokenizer)
