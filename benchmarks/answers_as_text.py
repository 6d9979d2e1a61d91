"""How many more prompt tokens hit the cache when an answer that comes back as text keeps its own ids?

    radixserve serve &
    python benchmarks/answers_as_text.py --base-url http://127.0.0.1:8000

Conversations of several sampled turns, each resending the history as text. `with` is what the chat route reports.
`without` is the same conversation, ids and all, as if answers were encoded anew: the prompt that /tokenize makes in a
namespace that knows no answers goes to completions in that namespace, then once more with the generated ids behind it,
so that the cache holds what the turn would have left there. Prints one JSON line; tokens are sums over the turns after
the first, which bring no answer back. Runs in a namespace of its own, so that a server can be measured again.
"""

import argparse
import asyncio
import uuid
from typing import Any

import httpx
import msgspec

from radixserve.bench.serve import describe_environment

QUESTIONS = (
    "What is a good name for a black cat?",
    "Why is the sky blue?",
    "How do I bake bread at home?",
    "Tell me about the city of Lisbon.",
    "What should I pack for a week in Norway?",
    "How does a bicycle stay upright?",
    "Who wrote Don Quixote, and when?",
    "Give me three ideas for a birthday present.",
    "What do bees do in winter?",
    "Explain what a compiler does.",
)
FOLLOW_UPS = ("Can you say more?", "Why do you think so?", "Give me an example.", "What else should I know?")


class Turn(msgspec.Struct, frozen=True):
    """One turn: the tokens of both prompts, and how many of each were in the cache."""

    prompt_with: int
    cached_with: int
    prompt_without: int
    cached_without: int
    is_canonical: bool


class Client:
    """Calls one server, in two namespaces: one that knows its answers and one that does not."""

    def __init__(self, http: httpx.AsyncClient, max_tokens: int) -> None:
        self._http = http
        self._max_tokens = max_tokens
        run = uuid.uuid4().hex
        self._knowing, self._unknowing = f"{run}-with", f"{run}-without"

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the answer to a request. Raises httpx.HTTPStatusError."""
        response = await self._http.post(path, json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    async def turn(self, messages: list[dict[str, str]], seed: int) -> Turn:
        """Ask for the next answer, append it to messages, and return what hit."""
        answer = await self.post(
            "/v1/chat/completions",
            messages=messages,
            temperature=1.0,
            top_p=0.95,
            max_tokens=self._max_tokens,
            seed=seed,
            return_token_ids=True,
            cache_salt=self._knowing,
        )
        [choice] = answer["choices"]
        encoded = await self.post("/tokenize", messages=messages, cache_salt=self._unknowing)
        anew = await self._compute(encoded["tokens"])
        await self._compute(encoded["tokens"] + choice["token_ids"])
        text = choice["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        canonical = await self.post("/tokenize", prompt=text, add_special_tokens=False)
        return Turn(
            prompt_with=answer["usage"]["prompt_tokens"],
            cached_with=cached_tokens(answer),
            prompt_without=anew["usage"]["prompt_tokens"],
            cached_without=cached_tokens(anew),
            is_canonical=canonical["tokens"] == choice["token_ids"][: canonical["count"]],
        )

    async def _compute(self, prompt: list[int]) -> dict[str, Any]:
        return await self.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt=self._unknowing)


def cached_tokens(answer: dict[str, Any]) -> int:
    """Return how many prompt tokens of an answer were read from the cache."""
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


async def converse(client: Client, question: str, num_turns: int, seed: int) -> list[Turn]:
    """Hold one conversation and return its turns."""
    messages = [{"role": "user", "content": question}]
    turns = []
    for number in range(num_turns):
        turns.append(await client.turn(messages, seed + number))
        messages.append({"role": "user", "content": FOLLOW_UPS[number % len(FOLLOW_UPS)]})
    return turns


async def measure(base_url: str, num_turns: int, max_tokens: int, seed: int) -> dict[str, Any]:
    """Hold all conversations at once and return the figures."""
    environment = describe_environment()
    async with httpx.AsyncClient(base_url=base_url, timeout=600.0) as http:
        version = (await http.get("/version")).json()
        client = Client(http, max_tokens)
        conversations = await asyncio.gather(
            *(converse(client, question, num_turns, seed + 1000 * i) for i, question in enumerate(QUESTIONS))
        )
    later = [turn for turns in conversations for turn in turns[1:]]
    return {
        "turns": len(conversations) * num_turns,
        "turns_with_history": len(later),
        "answers_not_canonical": sum(not turn.is_canonical for turns in conversations for turn in turns),
        "with": {
            "prompt_tokens": sum(turn.prompt_with for turn in later),
            "cached_tokens": sum(turn.cached_with for turn in later),
        },
        "without": {
            "prompt_tokens": sum(turn.prompt_without for turn in later),
            "cached_tokens": sum(turn.cached_without for turn in later),
        },
        "max_tokens": max_tokens,
        "seed": seed,
        "server": version,
        "environment": environment,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="of a radixserve, without /v1")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.base_url, arguments.turns, arguments.max_tokens, arguments.seed))
    print(msgspec.json.encode(figures).decode())


if __name__ == "__main__":
    main()
