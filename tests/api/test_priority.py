"""The field `priority`: the order of requests under the policy of that name, an error that names it under any other."""

import asyncio

import pytest

from radixserve.config import EngineConfig
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.api.serving import DEADLINE, called, error_of
from tests.stub import always
from tests.stub_engine import stub_engine

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "a"}]


async def test_a_lower_priority_starts_first(tokenizer: Tokenizer) -> None:
    config = EngineConfig(max_num_seqs=1, schedule_policy="priority")
    ended: list[str] = []
    async with called(stub_engine(tokenizer, always(65), config=config)) as client:

        async def ask(name: str, **fields: object) -> None:
            response = await client.post(COMPLETIONS, json={"prompt": name, **fields})
            assert response.status_code == 200
            ended.append(name)

        async def wait_for(running: int, waiting: int) -> None:
            async with asyncio.timeout(DEADLINE):
                while (await client.get("/v1/cache")).json()["requests"] != {"running": running, "waiting": waiting}:
                    await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask("first", max_tokens=400))
            await wait_for(1, 0)
            tasks.create_task(ask("later", priority=3))
            await wait_for(1, 1)
            tasks.create_task(ask("default"))
            await wait_for(1, 2)
            tasks.create_task(ask("sooner", priority=-1))
            await wait_for(1, 3)
    assert ended == ["first", "sooner", "default", "later"]


@pytest.mark.parametrize("policy", ["cache-aware", "fcfs"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (COMPLETIONS, {"prompt": ["a", "b"], "stream": True}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ],
)
async def test_under_another_policy_a_priority_is_refused_by_name(
    tokenizer: Tokenizer, policy: str, path: str, body: dict[str, object]
) -> None:
    config = EngineConfig.from_settings({"schedule_policy": policy})
    async with called(stub_engine(tokenizer, always(65), config=config)) as client:
        refused = await client.post(path, json=body | {"priority": 1})
        assert refused.status_code == 400
        error = error_of(refused)
        assert error["param"] == "priority"
        assert policy in error["message"]
        for nothing in (0, None):
            assert (await client.post(path, json=body | {"priority": nothing})).status_code == 200


@pytest.mark.parametrize("value", [2**63, 1.5, "1", True])
async def test_a_priority_is_a_64_bit_integer(tokenizer: Tokenizer, value: object) -> None:
    config = EngineConfig(schedule_policy="priority")
    async with called(stub_engine(tokenizer, always(65), config=config)) as client:
        refused = await client.post(COMPLETIONS, json={"prompt": "a", "priority": value})
        assert refused.status_code == 400
        assert error_of(refused)["param"] == "priority"
        assert (await client.post(COMPLETIONS, json={"prompt": "a", "priority": -(2**63)})).status_code == 200
