"""A tree of thoughts: sample some next steps from each promising path, keep the best, end with a beam search.

All paths begin with the same task, and the samples of one node with the same path: each is computed once.
Source: Yao et al. 2023 (Tree of Thoughts), breadth-first search; a path's score is its mean log-probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from openai import OpenAI
from openai.types import Completion

from agents_demo.server import find_server, positive, server_arguments
from agents_demo.steps import StepLog

TASK = (
    "Plans have short numbered steps, one a line, each building on those before it.\n\n"
    "Problem: A school wants its pupils to eat more fruit, and has a garden and little money.\n"
    "Plan:\n1. Ask the pupils which fruit they like best.\n2. Plant three trees of these kinds in the garden.\n"
    "3. Let each class care for one tree and eat what it bears.\n"
    "In one sentence, the plan is to let pupils grow the fruit that they chose.\n\n"
    "Problem: A small library wants more young readers. It has one room, two librarians and little money.\nPlan:\n"
)


@dataclass(frozen=True, slots=True)
class Path:
    """Steps so far as text, and what they are worth: the log-probabilities of all tokens and how many there are."""

    text: str
    logprob: float = 0.0
    num_tokens: int = 0

    @property
    def score(self) -> float:
        """The mean log-probability of a token."""
        return self.logprob / max(1, self.num_tokens)


@dataclass(frozen=True, slots=True)
class Search:
    """How wide and how deep to look: samples from each kept path, paths kept, steps of a plan."""

    samples: int
    keep: int
    depth: int


def grow(client: OpenAI, model: str, task: str, search: Search, log: StepLog) -> Path:
    """Return the best plan that the search finds."""
    paths = [Path("")]
    for number in range(1, search.depth + 1):
        # Samples may agree: each text is one path.
        grown: dict[str, Path] = {}
        for index, path in enumerate(paths, start=1):
            end = log.timer(f"path {index}", number)
            completion = client.completions.create(
                model=model,
                prompt=f"{task}{path.text}{number}.",
                n=search.samples,
                max_tokens=40,
                temperature=0.9,
                stop="\n",
                seed=number * 100 + index,
                logprobs=0,
                extra_body={"min_tokens": 6},
            )
            assert completion.usage is not None
            grown |= {grown_path.text: grown_path for grown_path in _continuations(path, number, completion)}
            end(f"{search.samples} samples", completion.usage)
        paths = sorted(grown.values(), key=lambda path: path.score, reverse=True)[: search.keep]
    return paths[0]


def conclude(client: OpenAI, model: str, task: str, path: Path, log: StepLog, *, beam_width: int) -> str:
    """Let a beam search sum a plan up."""
    end = log.timer("beam search", 1)
    completion = client.completions.create(
        model=model,
        prompt=f"{task}{path.text}In one sentence, the plan is to",
        max_tokens=40,
        stop="\n",
        extra_body={"use_beam_search": True, "beam_width": beam_width},
    )
    assert completion.usage is not None
    end(f"width {beam_width}", completion.usage)
    return completion.choices[0].text.strip()


def _continuations(path: Path, number: int, completion: Completion) -> list[Path]:
    grown = []
    for choice in completion.choices:
        assert choice.logprobs is not None
        logprobs = [logprob for logprob in choice.logprobs.token_logprobs or [] if logprob is not None]
        text = f"{path.text}{number}. {choice.text.strip()}\n"
        grown.append(Path(text, path.logprob + sum(logprobs), path.num_tokens + len(logprobs)))
    return grown


def main(arguments: Sequence[str] | None = None) -> None:
    """Grow a plan and print it."""
    parser = server_arguments("A tree of thoughts, by n samples and beam search over shared prefixes.")
    parser.add_argument("--samples", type=positive, default=4, help="next steps sampled from each path")
    parser.add_argument("--keep", type=positive, default=2, help="paths kept after each step")
    parser.add_argument("--depth", type=positive, default=3, help="steps of a plan")
    parser.add_argument("--beam-width", type=positive, default=4)
    options = parser.parse_args(arguments)
    server = find_server(options)
    search = Search(options.samples, options.keep, options.depth)
    with server.client() as client, StepLog("Tree of thoughts") as log:
        path = grow(client, server.model, TASK, search, log)
        conclusion = conclude(client, server.model, TASK, path, log, beam_width=options.beam_width)
    print(f"{path.text}The plan is to {conclusion}")


if __name__ == "__main__":
    main()
