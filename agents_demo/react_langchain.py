"""The ReAct loop of react_openai, written with LangChain: ChatOpenAI(base_url=...), bind_tools and messages."""

from collections.abc import Sequence
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails
from pydantic import SecretStr

from agents_demo.local_tools import call_tool
from agents_demo.react import SYSTEM_PROMPT, TOOLS, ask, react_arguments, tool_choice
from agents_demo.server import find_server
from agents_demo.steps import StepLog


def run_agent(model: ChatOpenAI, question: str, log: StepLog, *, name: str, max_steps: int) -> str | None:
    """Answer a question in at most max_steps calls of the model; return None if one of them was cut off."""
    tools = cast(list[dict[str, Any]], TOOLS)
    messages: list[BaseMessage] = [SystemMessage(SYSTEM_PROMPT), HumanMessage(question)]
    for number in range(1, max_steps + 1):
        end = log.timer(name, number)
        choice = tool_choice(number, max_steps)
        message = model.bind_tools(
            tools,
            tool_choice=choice if isinstance(choice, str) else choice["function"]["name"],
            parallel_tool_calls=False,
        ).invoke(messages)
        assert isinstance(message, AIMessage)
        # A call that was cut off is among the invalid_tool_calls.
        if not message.tool_calls:
            end("was cut off", _usage(message))
            return None
        call = message.tool_calls[0]
        end(f"{call['name']}({', '.join(map(str, call['args'].values()))})", _usage(message))
        if call["name"] == "answer":
            return str(call["args"]["text"])
        messages += [message, ToolMessage(call_tool(call["name"], call["args"]), tool_call_id=call["id"])]
    raise AssertionError("the last step always answers")


def _usage(message: AIMessage) -> CompletionUsage:
    """Return LangChain's usage in OpenAI's form."""
    usage = message.usage_metadata
    assert usage is not None
    cached = usage.get("input_token_details", {}).get("cache_read", 0)
    return CompletionUsage(
        prompt_tokens=usage["input_tokens"],
        completion_tokens=usage["output_tokens"],
        total_tokens=usage["total_tokens"],
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask the questions one after another."""
    options = react_arguments("A ReAct loop with three local tools, by LangChain.").parse_args(arguments)
    server = find_server(options)
    model = ChatOpenAI(
        base_url=server.base_url,
        api_key=SecretStr(server.api_key),
        model=server.model,
        temperature=0,
        max_completion_tokens=200,
    )
    ask(
        "ReAct with LangChain",
        options.question,
        lambda question, log, name: run_agent(model, question, log, name=name, max_steps=options.max_steps),
    )


if __name__ == "__main__":
    main()
