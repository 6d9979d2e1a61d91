"""The engine for offline use: lists in, lists out."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from types import TracebackType
from typing import Any, Self, cast

import msgspec
from anyio.from_thread import start_blocking_portal
from tqdm import tqdm

from radixserve.beam_search_params import BeamSearchParams
from radixserve.config import EngineConfig
from radixserve.engine.answer import GenerationResult
from radixserve.engine.answer_memory import AnswerMemory
from radixserve.engine.in_process import in_process_engine
from radixserve.errors import ConfigError, EngineUnavailable, InvalidRequest
from radixserve.sampling_params import SamplingParams
from radixserve.tokenizer.messages import Message, refuse_marked_parts, template_messages
from radixserve.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int]

_NAMESPACE = b""  # all prompts of one LLM share their prefixes

_SERVER_FIELDS = {
    "host",
    "port",
    "api_key",
    "served_model_name",
    "tool_call_parser",
    "request_timeout",
    "shutdown_timeout",
    "cors_origin",
}


class LLM:
    """A model loaded in this process. Use it as a context manager, or close() it, to free the model.

    model: a Hugging Face directory or a .gguf file; left out, the demo model. settings: fields of EngineConfig, but
    those that only a server reads. Raises ConfigError.

    The engine runs in a thread with an event loop of its own, so it works inside a running loop (a notebook) too.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if misplaced := sorted(_SERVER_FIELDS & settings.keys()):
            raise ConfigError(f"{', '.join(misplaced)}: only a server has this; leave it out of LLM")
        config = EngineConfig.from_settings({"model": model} | settings)
        self._is_closed = False
        self._engine = in_process_engine(config, show_progress=True)
        self._answer_memory = AnswerMemory(self._engine.tokenizer)
        with ExitStack() as resources:
            self._portal = resources.enter_context(start_blocking_portal())
            self._portal.call(self._engine.start)
            resources.callback(lambda: self._portal.call(self._engine.close))
            self._resources = resources.pop_all()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int | Sequence[int] = 0,
        show_progress: bool = True,
    ) -> list[GenerationResult]:
        """Answer prompts, given as text or token ids; results come in their order.

        priority: of all, or one for each prompt; lower starts first, with schedule_policy="priority".
        Raises a RequestError if one prompt cannot be answered; then the others are not answered either.
        """
        return self._answer(prompts, params or SamplingParams(), priority, show_progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        priority: int | Sequence[int] = 0,
        show_progress: bool = True,
    ) -> list[GenerationResult]:
        """Search answers to prompts, given as text or token ids; results come in their order, answers best first.

        Each answer has its score in `beam`, each result its blocks in `beam_memory`. priority and errors are those of
        generate.
        """
        return self._answer(prompts, params, priority, show_progress)

    def _answer(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        priority: int | Sequence[int],
        show_progress: bool,
    ) -> list[GenerationResult]:
        if self._is_closed:
            raise EngineUnavailable("this LLM is closed; make another")
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        priorities = [priority] * len(encoded) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(encoded):
            raise InvalidRequest(f"{len(encoded)} prompts have {len(priorities)} priorities", param="priority")
        call = self._portal.start_task_soon(self._generate_all, encoded, params, priorities, show_progress)
        try:
            return call.result()
        finally:
            call.cancel()  # at Ctrl-C: nobody waits for the answers that still run

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | None = None,
        *,
        priority: int | Sequence[int] = 0,
        show_progress: bool = True,
    ) -> list[GenerationResult]:
        """Answer one conversation or several, each a list of messages in OpenAI's form, by the chat template.

        An assistant's message that is exactly an earlier answer of chat is taken as the ids it was generated as.
        priority: as in generate.
        Raises a RequestError if a conversation cannot be answered; then the others are not answered either.
        """
        is_one = not messages or isinstance(messages[0], dict)
        conversations = [messages] if is_one else messages
        prompts = [self._encode_chat(conversation) for conversation in conversations]
        results = self.generate(prompts, params, priority=priority, show_progress=show_progress)
        for result in results:
            for answer in result.answers:
                self._answer_memory.remember(_NAMESPACE, result.prompt_token_ids, answer)
        return results

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return msgspec.convert(prompt, list[int])
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"a prompt is text or a list of token ids: {error}", param="prompt") from None

    def _encode_chat(self, conversation: object) -> list[int]:
        try:
            messages = msgspec.convert(conversation, list[Message])
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"a conversation is a list of messages: {error}", param="messages") from None
        refuse_marked_parts(messages, "by LLM, whose cache ends with its program")
        answers = self._answer_memory.lookup(_NAMESPACE)
        return self.tokenizer.encode_chat(template_messages(messages), answers=answers)

    async def _generate_all(
        self,
        prompts: list[list[int]],
        params: SamplingParams | BeamSearchParams,
        priorities: list[int],
        show_progress: bool,
    ) -> list[GenerationResult]:
        results = [GenerationResult.empty(prompt, params.num_returned) for prompt in prompts]
        # No more at once than the queue takes, so that a long list is never refused for its length.
        places = asyncio.Semaphore(self._engine.config.max_queued_requests)

        async def collect(result: GenerationResult, priority: int) -> None:
            async with places:
                deltas = self._engine.generate(result.prompt_token_ids, params, priority=priority)
                async with aclosing(deltas):
                    async for delta in deltas:
                        result.add(delta)
            progress.update()

        with tqdm(total=len(prompts), desc="prompts", disable=not show_progress) as progress:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for result, priority in zip(results, priorities, strict=True):
                        tasks.create_task(collect(result, priority))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return results

    def close(self) -> None:
        """End the engine and free the model. Closing it again does nothing."""
        self._is_closed = True
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of a call that gave one, as text or token ids, or several."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
