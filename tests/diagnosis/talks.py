"""Conversations in several chat templates, and what a cache would tell of them."""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from radixserve.diagnosis.diagnose import diagnose
from radixserve.diagnosis.prompt import Conversation, DiagnosedPrompt
from radixserve.diagnosis.report import Diagnosis
from radixserve.model_path import resolve_model_path
from radixserve.protocol import MAX_OTHER_TOKENS, LostPrefix, OtherPrompt, PromptFacts
from radixserve.tokenizer.messages import FunctionCall, Message, ToolCall, template_messages
from radixserve.tokenizer.tokenizer import Tokenizer

Tools = list[dict[str, Any]]

# What the families of templates do, in the demo model's control tokens. None: its own template, ChatML without tools.
TEMPLATES: dict[str, str | None] = {
    "chatml": None,
    # Control tokens around the role, a trimmed text, tools with line breaks behind the first message.
    "headers": (
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n\n{{ (m.content or '') | trim }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "{% if loop.first and tools %}\nTools:{% for t in tools %}\n{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
        "<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
    ),
    # No control tokens, and the tools before the last question.
    "brackets": (
        "{% for m in messages %}"
        "{% if m.role == 'user' %}{% if tools and loop.last %}[TOOLS] {{ tools | tojson }}[/TOOLS]{% endif %}"
        "[INST] {{ m.content }}[/INST]{% elif m.role == 'system' %}{{ m.content }}\n\n"
        "{% else %} {{ m.content }}</s>{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endif %}"
        "{% endfor %}"
    ),
    # Only the answers after the last question keep their thinking.
    "forgetful": (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set c = m.content or '' %}"
        "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
        "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def load(template: str, directory: Path) -> Tokenizer:
    """Load the demo model's tokenizer with one of TEMPLATES."""
    text = TEMPLATES[template]
    if text is None:
        return Tokenizer.load(resolve_model_path(None))
    file = directory / f"{template}.jinja"
    file.write_text(text)
    return Tokenizer.load(resolve_model_path(None), chat_template=file)


class Model:
    """A model's tokenizer, and the diagnosis of prompts of its."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, messages: list[Message], tools: Tools | None = None) -> list[int]:
        """Return the prompt of a conversation."""
        return self.tokenizer.encode_chat(template_messages(messages), tools=tools)

    def cached(self, messages: list[Message], tools: Tools | None = None) -> list[int]:
        """Return what the cache holds of a conversation that the model had: if the last message is an answer, its text
        without an end.
        """
        if messages[-1].role != "assistant":
            return self.encode(messages, tools)
        answer = messages[-1].content
        assert isinstance(answer, str)
        return self.encode(messages[:-1], tools) + self.tokenizer.encode(answer)

    def diagnose(
        self,
        messages: list[Message],
        *cached: Sequence[int],
        tools: Tools | None = None,
        num_cut_tokens: int = 0,
    ) -> Diagnosis:
        """Return the diagnosis of a conversation in a cache that holds these prompts, the latest first."""
        token_ids = self.encode(messages, tools)[num_cut_tokens:]
        conversation = Conversation(messages, lambda changed: self.encode(changed, tools), num_cut_tokens)
        facts = facts_of(token_ids, cached)
        return diagnose(DiagnosedPrompt(token_ids, conversation), facts, self.tokenizer, sees_other_namespaces=False)

    def diagnose_text(self, text: str, *cached: str) -> Diagnosis:
        """Return the diagnosis of a prompt without messages."""
        token_ids = self.tokenizer.encode(text)
        facts = facts_of(token_ids, [self.tokenizer.encode(other) for other in cached])
        return diagnose(DiagnosedPrompt(token_ids, None), facts, self.tokenizer, sees_other_namespaces=False)


def explain(model: Model, messages: list[Message], facts: PromptFacts, is_answer: Callable[[str], bool]) -> Diagnosis:
    """Return the diagnosis of a conversation by these facts. is_answer: whether the server has given an answer."""
    prompt = DiagnosedPrompt(model.encode(messages), Conversation(messages, model.encode, is_answer=is_answer))
    return diagnose(prompt, facts, model.tokenizer, sees_other_namespaces=False)


def facts_of(token_ids: Sequence[int], cached: Sequence[Sequence[int]], lost: LostPrefix | None = None) -> PromptFacts:
    """Return what a cache that holds these prompts tells of one."""
    common = [num_common(token_ids, other) for other in cached]
    furthest = max(common, default=0)
    num_hit = min(furthest, len(token_ids) - 1)
    others = [
        OtherPrompt(
            array("i", other[num_hit : num_hit + MAX_OTHER_TOKENS]).tobytes(), seconds_idle=1.0, num_requests_hit=1
        )
        for num, other in zip(common, cached, strict=True)
        if num == furthest and len(other) > num_hit
    ]
    return PromptFacts(len(token_ids), num_hit, furthest, lost, others[:4], 0)


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str, *calls: tuple[str, str]) -> Message:
    """calls: names and arguments."""
    return Message("assistant", text, tool_calls=[ToolCall(FunctionCall(*call)) for call in calls] or None)


def tool(name: str, description: str = "Does things.", **properties: str) -> dict[str, Any]:
    """A tool with string parameters, described in these words."""
    described = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": described, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
