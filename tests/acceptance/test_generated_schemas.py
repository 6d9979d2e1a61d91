"""Random JSON schemas on the demo model: what it finishes is right, and it finishes most."""

import asyncio
import json
import random
from contextlib import aclosing
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from radixserve.config import EngineConfig
from radixserve.engine.answer import Answer, GenerationResult
from radixserve.engine.async_engine import AsyncEngine
from radixserve.engine.in_process import in_process_engine
from radixserve.grammar import Grammar
from radixserve.sampling_params import SamplingParams
from tests.schema_generator import generate_schema

NUM_SCHEMAS = 200
MUST_FINISH = 150

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1200)]


async def answer(engine: AsyncEngine, schema: dict[str, Any], seed: int) -> Answer:
    # One prompt for all, computed once: the grammar alone decides whether an answer is right.
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "Give an example as JSON."}])
    grammar = Grammar("json_schema", json.dumps(schema))
    params = SamplingParams(max_tokens=256, temperature=1.0, seed=seed, grammar=grammar)
    result = GenerationResult.empty(prompt, 1)
    async with aclosing(engine.generate(prompt, params)) as deltas:
        async for delta in deltas:
            result.add(delta)
    return result.answers[0]


async def test_most_answers_to_generated_schemas_finish_and_all_of_these_validate() -> None:
    randomness = random.Random(0)
    schemas = [generate_schema(randomness) for _ in range(NUM_SCHEMAS)]
    engine = in_process_engine(EngineConfig(max_num_seqs=48))
    try:
        answers = await asyncio.gather(*(answer(engine, schema, seed) for seed, schema in enumerate(schemas)))
    finally:
        await engine.close()
    finished = [pair for pair in zip(schemas, answers, strict=True) if pair[1].finish_reason == "stop"]
    assert len(finished) >= MUST_FINISH
    for schema, made in finished:
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        validator.validate(json.loads(made.text))
