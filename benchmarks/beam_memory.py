"""How many K/V blocks do beams save by sharing? Searches answers to twelve questions with the demo model.

    python benchmarks/beam_memory.py --width 6 --tokens 48

Prints one JSON line. The saving of a search is 1 - peak_blocks / peak_blocks_without_sharing, at the step at which its
beams held the most blocks together.
"""

import argparse
import statistics

import msgspec

from radixserve import LLM, BeamSearchParams
from radixserve.tokenizer.messages import Message, template_messages
from radixserve.version import __version__

QUESTIONS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a harbour in winter.",
    "How do I boil an egg so that the yolk stays soft?",
    "Name three animals that sleep through the winter, and say where they do it.",
    "Translate into German: The train to the coast leaves at nine in the morning from platform four.",
    "Write a Python function that counts how often each word occurs in a text, and explain how it works.",
    "My neighbour plays the trumpet at night. Write a friendly letter that asks him to stop at ten o'clock.",
    "Summarise: Anna counted the boats every morning. On 14 March there were only two. She put down her cup and ran "
    "outside, where the tide had just turned and nobody could be seen on the mud.",
    "A shop sells pens for 2 euros and books for 9 euros. I buy three pens and two books and pay with a note of 50 "
    "euros. How much do I get back, and how many more pens could I buy for that?",
    "List the steps for repairing a flat bicycle tyre by the side of the road, with nothing but a patch kit, a pump "
    "and two tyre levers. Say for each step what can go wrong and how one notices it in time.",
    "Compare a radix tree with a hash table for finding the longest prefix of a text that was seen before. Say what "
    "each costs in memory and in time, when you would choose which, and what happens if many texts begin with the same "
    "two thousand words and then go different ways.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    params = BeamSearchParams(
        beam_width=arguments.width, max_tokens=arguments.tokens, min_tokens=arguments.tokens, early_stopping=True
    )
    with LLM(dtype="float32", num_kv_blocks=1024) as llm:
        prompts = [
            llm.tokenizer.encode_chat(template_messages([Message(role="user", content=question)]))
            for question in QUESTIONS
        ]
        # One after another, so that no search finds blocks of another that is still running.
        results = [llm.beam_search([prompt], params, show_progress=False)[0] for prompt in prompts]
    memories = [result.beam_memory for result in results if result.beam_memory is not None]
    savings = sorted(1 - memory.peak_blocks / memory.peak_blocks_without_sharing for memory in memories)
    document = {
        "version": __version__,
        "width": arguments.width,
        "tokens": arguments.tokens,
        "block_size": memories[0].block_size,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "peak_blocks": [memory.peak_blocks for memory in memories],
        "peak_blocks_without_sharing": [memory.peak_blocks_without_sharing for memory in memories],
        "blocks_copied": [memory.blocks_copied for memory in memories],
        "saving_median": statistics.median(savings),
        "saving_lowest": savings[0],
        "saving_highest": savings[-1],
        "saving_of_all": 1
        - sum(memory.peak_blocks for memory in memories)
        / sum(memory.peak_blocks_without_sharing for memory in memories),
    }
    print(msgspec.json.encode(document).decode())


if __name__ == "__main__":
    main()
