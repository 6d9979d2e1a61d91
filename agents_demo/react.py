"""What the two ReAct programs share: questions, tools, and which of them the model may call when.

Source of the loop: Yao et al. 2022 (ReAct).
"""

import argparse
from collections.abc import Callable
from typing import Literal

from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionNamedToolChoiceParam

from agents_demo.local_tools import TOOL_DESCRIPTIONS, describe
from agents_demo.server import positive, server_arguments
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
TOOLS: list[ChatCompletionFunctionToolParam] = [*TOOL_DESCRIPTIONS, ANSWER]

# Answers a question, as the agent of that name; None if a call was cut off.
Agent = Callable[[str, StepLog, str], str | None]


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


def react_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of the flags of both programs."""
    parser = server_arguments(description)
    parser.add_argument("--question", action="append", help="repeatable; default: two that need the tools")
    parser.add_argument("--max-steps", type=positive, default=5, help="calls of the model to a question")
    return parser


def ask(title: str, questions: list[str] | None, agent: Agent) -> None:
    """Ask the questions one after another, or those of the demo, and print steps, summary and answers."""
    asked = questions or QUESTIONS
    with StepLog(title) as log:
        answers = [agent(question, log, f"question {number}") for number, question in enumerate(asked, start=1)]
    for question, answer in zip(asked, answers, strict=True):
        print(f"Q: {question}\nA: {'none: a call was cut off' if answer is None else answer}")
