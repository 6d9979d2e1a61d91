"""A ReAct loop with the openai package: the model calls a tool, reads its result, and goes on until it answers.

Every step resends the whole conversation, so all but the newest messages should come out of the cache.
"""

import json
from collections.abc import Sequence

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from agents_demo.local_tools import call_tool
from agents_demo.react import SYSTEM_PROMPT, TOOLS, ask, react_arguments, tool_choice
from agents_demo.server import find_server
from agents_demo.steps import StepLog


def run_agent(client: OpenAI, model: str, question: str, log: StepLog, *, name: str, max_steps: int) -> str | None:
    """Answer a question in at most max_steps calls of the model; return None if one of them was cut off."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    for number in range(1, max_steps + 1):
        end = log.timer(name, number)
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=tool_choice(number, max_steps),
            parallel_tool_calls=False,
            temperature=0,
            max_completion_tokens=200,
        )
        assert completion.usage is not None
        choice = completion.choices[0]
        calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
        # The arguments of a call that was cut off are no JSON.
        if choice.finish_reason == "length" or not calls:
            end("was cut off", completion.usage)
            return None
        call, function = calls[0], calls[0].function
        arguments = json.loads(function.arguments)
        end(f"{function.name}({', '.join(map(str, arguments.values()))})", completion.usage)
        if function.name == "answer":
            return str(arguments["text"])
        messages += [
            {
                "role": "assistant",
                "content": choice.message.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": function.name, "arguments": function.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.id, "content": call_tool(function.name, arguments)},
        ]
    raise AssertionError("the last step always answers")


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask the questions one after another."""
    options = react_arguments("A ReAct loop with three local tools, by the openai package.").parse_args(arguments)
    server = find_server(options)
    with server.client() as client:
        ask(
            "ReAct with openai",
            options.question,
            lambda question, log, name: run_agent(
                client, server.model, question, log, name=name, max_steps=options.max_steps
            ),
        )


if __name__ == "__main__":
    main()
