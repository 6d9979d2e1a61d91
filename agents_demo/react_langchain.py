"""The ReAct loop of react_openai, written with LangChain: ChatOpenAI(base_url=...), bind_tools and messages."""

from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails
from pydantic import SecretStr

from agents_demo.local_tools import TOOL_DESCRIPTIONS, call_tool
from agents_demo.react_openai import ANSWER, QUESTIONS, SYSTEM_PROMPT, tool_choice
from agents_demo.server import count, find_server, server_arguments
from agents_demo.steps import StepLog


def run_agent(model: ChatOpenAI, question: str, log: StepLog, *, agent: str, max_steps: int) -> str:
    """Answer a question in at most max_steps calls of the model, and return the answer."""
    tools = cast(list[dict[str, Any]], [*TOOL_DESCRIPTIONS, ANSWER])
    messages: list[BaseMessage] = [SystemMessage(SYSTEM_PROMPT), HumanMessage(question)]
    for number in range(1, max_steps + 1):
        end = log.timer(agent, number)
        choice = tool_choice(number, max_steps)
        message = model.bind_tools(
            tools,
            tool_choice=choice if isinstance(choice, str) else choice["function"]["name"],
            parallel_tool_calls=False,
        ).invoke(messages)
        assert isinstance(message, AIMessage)
        if not message.tool_calls:
            end("was cut off", _usage(message))
            return ""
        call = message.tool_calls[0]
        end(f"{call['name']}({', '.join(map(str, call['args'].values()))})", _usage(message))
        if call["name"] == "answer":
            return str(call["args"].get("text", ""))
        messages += [message, ToolMessage(call_tool(call["name"], call["args"]), tool_call_id=call["id"])]
    raise AssertionError("the last step always answers")


def _usage(message: AIMessage) -> CompletionUsage:
    """Return LangChain's usage in OpenAI's form."""
    usage = message.usage_metadata
    assert usage is not None
    return CompletionUsage(
        prompt_tokens=usage["input_tokens"],
        completion_tokens=usage["output_tokens"],
        total_tokens=usage["total_tokens"],
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage["input_token_details"]["cache_read"]),
    )


def main() -> None:
    """Ask the questions one after another."""
    parser = server_arguments("A ReAct loop with three local tools, by LangChain.")
    parser.add_argument("--question", action="append", help="repeatable; default: two that need the tools")
    parser.add_argument("--max-steps", type=count, default=5)
    options = parser.parse_args()
    server = find_server(options)
    model = ChatOpenAI(
        base_url=server.base_url,
        api_key=SecretStr(server.api_key),
        model=server.model,
        temperature=0,
        frequency_penalty=0.3,
        max_completion_tokens=200,
    )
    answers = []
    with StepLog("ReAct with LangChain") as log:
        for index, question in enumerate(options.question or QUESTIONS, start=1):
            answers.append(run_agent(model, question, log, agent=f"question {index}", max_steps=options.max_steps))
    for question, answer in zip(options.question or QUESTIONS, answers, strict=True):
        print(f"Q: {question}\nA: {answer}")


if __name__ == "__main__":
    main()
