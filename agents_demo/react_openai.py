"""A ReAct loop with the openai package: the model calls a tool, reads its result, and goes on until it answers.

Every step resends the whole conversation, so all but the newest messages should come out of the cache.
Source of the loop: Yao et al. 2022 (ReAct).
"""

import json
from typing import Any, Literal

from openai import OpenAI
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
    ChatCompletionNamedToolChoiceParam,
)

from agents_demo.local_tools import TOOL_DESCRIPTIONS, call_tool, describe
from agents_demo.server import count, find_server, server_arguments
from agents_demo.steps import StepLog

QUESTIONS = (
    "How many metres is Mount Everest above sea level, and how many feet is that?",
    "How many marathons would take a runner from the Earth to the Moon?",
)
SYSTEM_PROMPT = (
    "You are a careful assistant that answers questions with tools. In each turn call one tool. Begin with look_up, "
    "which finds a fact; then use convert to change units and calculate for arithmetic. Never guess a number that a "
    "tool can give. As soon as the results of the tools hold the answer, call answer with one short sentence."
)
ANSWER = describe("answer", "Tell the user the final answer.", {"text": {"type": "string", "maxLength": 100}})
_TOOLS: list[ChatCompletionFunctionToolParam] = [*TOOL_DESCRIPTIONS, ANSWER]


def tool_choice(number: int, max_steps: int) -> Literal["required"] | ChatCompletionNamedToolChoiceParam:
    """Return which tool the model may call in a step.

    A small model forgets to call one, or answers before it knows anything. So it must call a tool in every step, look
    something up in the first one and answer in the last. The list of tools stays as it is: it stands at the beginning
    of the prompt, and whatever comes behind a change there would have to be computed again.
    """
    if number == max_steps:
        return {"type": "function", "function": {"name": "answer"}}
    if number == 1:
        return {"type": "function", "function": {"name": "look_up"}}
    return "required"


def run_agent(client: OpenAI, model: str, question: str, log: StepLog, *, agent: str, max_steps: int) -> str:
    """Answer a question in at most max_steps calls of the model, and return the answer."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    for number in range(1, max_steps + 1):
        end = log.timer(agent, number)
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=_TOOLS,
            tool_choice=tool_choice(number, max_steps),
            parallel_tool_calls=False,
            temperature=0,
            frequency_penalty=0.3,
            max_tokens=200,
        )
        assert completion.usage is not None
        message = completion.choices[0].message
        calls = [call for call in message.tool_calls or [] if call.type == "function"]
        if not calls:
            end("was cut off", completion.usage)
            return ""
        name, arguments = calls[0].function.name, _parse(calls[0].function.arguments)
        end(f"{name}({', '.join(map(str, arguments.values()))})", completion.usage)
        if name == "answer":
            return str(arguments.get("text", ""))
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": calls[0].id,
                        "type": "function",
                        "function": {"name": name, "arguments": calls[0].function.arguments},
                    }
                ],
            }
        )
        messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": call_tool(name, arguments)})
    raise AssertionError("the last step always answers")


def _parse(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; none for text that is no JSON object, as that of a call that was cut off."""
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def main() -> None:
    """Ask the questions one after another."""
    parser = server_arguments("A ReAct loop with three local tools, by the openai package.")
    parser.add_argument("--question", action="append", help="repeatable; default: two that need the tools")
    parser.add_argument("--max-steps", type=count, default=5)
    options = parser.parse_args()
    server = find_server(options)
    client = server.client()
    answers = []
    with StepLog("ReAct with openai") as log:
        for index, question in enumerate(options.question or QUESTIONS, start=1):
            agent = f"question {index}"
            answers.append(run_agent(client, server.model, question, log, agent=agent, max_steps=options.max_steps))
    for question, answer in zip(options.question or QUESTIONS, answers, strict=True):
        print(f"Q: {question}\nA: {answer}")


if __name__ == "__main__":
    main()
