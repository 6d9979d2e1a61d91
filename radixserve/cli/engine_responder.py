"""An engine in this process as the one who answers."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from radixserve.bench.message import Message, as_json
from radixserve.cli.responder import AnswerPart
from radixserve.engine.async_engine import AsyncEngine
from radixserve.sampling_params import SamplingParams


class EngineResponder:
    """Answers by an engine of its own, which it starts and closes."""

    def __init__(self, engine: AsyncEngine, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params

    async def start(self) -> str:
        """Load the model. Raises ConfigError."""
        ready = await self._engine.start()
        return f"{ready.model_name}, {ready.weights_dtype} on {ready.device}"

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[AnswerPart, None]:
        """Yield the answer, a part a step. Raises RequestError, as when the conversation has outgrown the context."""
        prompt = self._engine.tokenizer.encode_chat(as_json(messages))
        num_generated_tokens = 0
        async with aclosing(self._engine.generate(prompt, self._params)) as deltas:
            async for delta in deltas:
                num_generated_tokens += len(delta.token_ids)
                yield AnswerPart(
                    text=delta.text,
                    num_generated_tokens=num_generated_tokens,
                    num_prompt_tokens=len(prompt),
                    num_cached_tokens=delta.num_cached_tokens,
                )

    async def close(self) -> None:
        """End the engine."""
        await self._engine.close()
