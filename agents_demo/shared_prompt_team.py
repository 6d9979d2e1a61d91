"""Eight agents at work at once, all under one long system prompt, each with a conversation of its own.

The system prompt is computed once for the whole team, and every turn finds its own conversation in the cache.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from agents_demo.server import find_server, server_arguments
from agents_demo.steps import StepLog

ROLES = ("planner", "researcher", "writer", "editor", "critic", "designer", "tester", "manager")
TASKS = (
    "The team makes a leaflet about saving water at home. What is your part in it? Answer in one sentence.",
    "What do you need from the others before you begin? Answer in one sentence.",
    "Name the greatest risk for your part, in one sentence.",
    "What do you tell the team at the end of the week? Answer in one sentence.",
)
_GUIDE = (
    "Say only what you know, and say so when you do not.",
    "Keep every answer short: one sentence unless the task asks for more.",
    "Name the person who does a thing and the day on which it is done.",
    "When two goals conflict, the reader's need goes before the team's comfort.",
    "Numbers have units; dates have a year; names are spelled as their owners spell them.",
    "Nothing leaves the team before a second pair of eyes has read it.",
    "A problem is told on the day it is found, with what was tried.",
    "Plain words go before clever ones, and verbs before nouns.",
    "A question to another member names the answer that would settle it.",
    "What was decided is written down once, in the team's log, and not decided again.",
)
_MEMBERS = {
    "planner": "cuts the work into days and knows what depends on what",
    "researcher": "finds facts, checks them twice and keeps the sources",
    "writer": "turns facts into sentences that a tired reader understands",
    "editor": "shortens, corrects and keeps one voice through all pages",
    "critic": "looks for what is wrong or missing, and says it kindly",
    "designer": "chooses pictures, type and paper within the budget",
    "tester": "gives the draft to readers and writes down where they stop",
    "manager": "speaks with the client, and decides when the work is done",
}


def system_prompt() -> str:
    """Return the prompt that the whole team shares, some 500 tokens."""
    rules = "\n".join(f"{number}. {rule}" for number, rule in enumerate(_GUIDE, start=1))
    members = "\n".join(f"- The {role} {duty}." for role, duty in _MEMBERS.items())
    return (
        "You are one member of a team of eight that makes printed leaflets for a town. Each member has a role and "
        "answers only for it, but all of them follow the same guide and know what the others do.\n\n"
        f"The team:\n{members}\n\nThe guide:\n{rules}\n\n"
        "The user tells you your role and then asks. Answer as that member of the team."
    )


def run_member(client: OpenAI, model: str, role: str, log: StepLog, *, num_tasks: int) -> list[str]:
    """Lead one member through its tasks, and return what it said."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": system_prompt()}]
    said = []
    for number, task in enumerate(TASKS[:num_tasks], start=1):
        content = f"You are the {role}. {task}" if number == 1 else task
        messages.append({"role": "user", "content": content})
        end = log.timer(role, number)
        completion = client.chat.completions.create(
            model=model, messages=messages, temperature=0.7, max_tokens=48, seed=number
        )
        assert completion.usage is not None
        text = completion.choices[0].message.content or ""
        end(" ".join(text.split()[:4]), completion.usage)
        messages.append({"role": "assistant", "content": text})
        said.append(text)
    return said


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the team, all members at once."""
    parser = server_arguments("Eight agents that share one long system prompt.")
    parser.add_argument("--tasks", type=int, default=len(TASKS), choices=range(1, len(TASKS) + 1))
    options = parser.parse_args(arguments)
    server = find_server(options)
    with (
        server.client() as client,
        StepLog("A team with one system prompt") as log,
        ThreadPoolExecutor(len(ROLES)) as threads,
    ):
        runs = [threads.submit(run_member, client, server.model, role, log, num_tasks=options.tasks) for role in ROLES]
        for run in runs:
            run.result()


if __name__ == "__main__":
    main()
