"""POST /v1/cache/explain, and the diagnoses that answers carry: what a prompt hits in the cache, and why not more."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixserve.api.incoming import Incoming, receive
from radixserve.api.messages import encode_messages
from radixserve.api.options import namespace_of
from radixserve.api.prompts import check_prompt_or_messages, encode_prompts, split_prompts, truncate
from radixserve.api.requests import ChatRequest, ExplainRequest
from radixserve.api.sampling import completion_max_tokens, max_tokens_of
from radixserve.api.service import Service
from radixserve.api.tools import check_tools
from radixserve.diagnosis.diagnose import diagnose
from radixserve.diagnosis.prompt import Conversation, DiagnosedPrompt
from radixserve.diagnosis.report import Diagnosis
from radixserve.errors import InvalidRequest, PromptTooLong
from radixserve.protocol import ExplainPrompt, PromptFacts
from radixserve.tokenizer.answer_turns import AnswerLookup
from radixserve.tokenizer.messages import Message
from radixserve.tokenizer.tokenizer import Tokenizer
from radixserve.tokenizer.tools import template_tools


async def explain(request: Request) -> Response:
    """Say what a prompt would hit now, and why not more. Changes nothing, and tells of the caller's tenant alone."""
    incoming = await receive(request)
    prompt, namespace = await incoming.in_worker(_prepare)
    [diagnosis] = await diagnose_prompts(incoming.service, [prompt], namespace, field=None)
    return Response(msgspec.json.encode(diagnosis), media_type="application/json")


async def diagnose_prompts(
    service: Service, prompts: Sequence[DiagnosedPrompt], namespace: bytes, field: str | None = "cache_diagnostics"
) -> list[Diagnosis]:
    """Return a diagnosis of each prompt, as of now. field: that asks for it.

    Raises EngineUnavailable, and InvalidRequest if the server has no prefix cache.
    """
    if prompts and service.engine.config.no_prefix_cache:
        raise InvalidRequest(
            "there is nothing to explain: this server runs with --no-prefix-cache and computes every prompt anew",
            param=field,
        )
    sees_other_namespaces = service.engine.config.enable_cache_introspection
    diagnoses = []
    for prompt in prompts:
        command = ExplainPrompt(array("i", prompt.token_ids).tobytes(), namespace, sees_other_namespaces)
        facts = await service.engine.control(command)
        assert isinstance(facts, PromptFacts)
        run = partial(diagnose, sees_other_namespaces=sees_other_namespaces)
        diagnoses.append(await service.run_in_worker(run, prompt, facts, service.engine.tokenizer))
    return diagnoses


def chat_prompt(
    token_ids: list[int],
    request: ChatRequest | ExplainRequest,
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]] | None,
    answers: AnswerLookup,
) -> DiagnosedPrompt:
    """Return a conversation's prompt for a diagnosis. token_ids: as they go to the engine, after any truncation.

    request: the one that messages are of. tools, answers: as in encode_messages.
    """

    def encode(messages: list[Message]) -> list[int]:
        return encode_messages(messages, request, tokenizer, tools, answers)

    num_cut_tokens = 0 if request.truncate_prompt_tokens is None else len(encode(messages)) - len(token_ids)
    conversation = Conversation(messages, encode, num_cut_tokens, lambda text: answers(text) is not None)
    return DiagnosedPrompt(token_ids, conversation)


def _prepare(incoming: Incoming) -> tuple[DiagnosedPrompt, bytes]:
    """Return the prompt and its namespace. Slow for long texts: off the event loop."""
    service, ready = incoming.service, incoming.ready
    request = incoming.decode(ExplainRequest)
    check_prompt_or_messages(request.prompt, request.messages)
    namespace = namespace_of(incoming, request.cache_salt)
    tokenizer = service.engine.tokenizer
    if request.messages is not None:
        tools = template_tools(check_tools(request.tools, request.tool_choice))
        answers = service.answer_memory.lookup(namespace)
        token_ids = encode_messages(request.messages, request, tokenizer, tools, answers)
        token_ids = truncate(token_ids, request.truncate_prompt_tokens, ready.max_model_len, max_tokens_of(request))
        prompt = chat_prompt(token_ids, request, request.messages, tokenizer, tools, answers)
    else:
        is_given = request.max_tokens is not None or request.max_completion_tokens is not None
        budget = completion_max_tokens(request) if is_given else None
        [token_ids] = encode_prompts(split_prompts(request.prompt, 1), tokenizer, ready.vocab_size)
        token_ids = truncate(token_ids, request.truncate_prompt_tokens, ready.max_model_len, budget)
        prompt = DiagnosedPrompt(token_ids, None)
    if len(token_ids) >= ready.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(token_ids)} tokens, and the model takes {ready.max_model_len} with the answer",
            param="prompt" if request.messages is None else "messages",
        )
    return prompt, namespace
