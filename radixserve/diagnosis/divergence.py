"""Whether a prompt should have gone on with a cached one and does not, and by which common mistake."""

from dataclasses import dataclass

from radixserve.diagnosis.answers import answer_pattern, is_answer_left_out, is_respelled, pattern_of_change
from radixserve.diagnosis.classics import Excerpt, lacks_thinking, names, pattern_of_value
from radixserve.diagnosis.comparison import Change, Comparison
from radixserve.diagnosis.passage import Passage
from radixserve.diagnosis.prompt import Conversation, DiagnosedPrompt, Place
from radixserve.diagnosis.report import Divergence, Pattern, Where
from radixserve.diagnosis.tool_texts import ToolChange, tool_change

# Fewer tokens than these, at the end of an answer, are not worth a word.
_MIN_RETOKENISED = 4
# Equal words behind a difference from which on two prompts are the same conversation, or the same instructions.
_MIN_SAME_CONVERSATION = 24
_MIN_SAME_INSTRUCTIONS = 12
_MIN_SAME_REST = 8
_MIN_CUT_HISTORY = 12
# Words of a question and its answer from which on two conversations are one; where there are calls, short ones too.
_MIN_SAME_TALK = 12
_MIN_SAME_CALL = 4
# Characters around a value, which may be part of a longer one.
_NUM_AROUND = 80
_MAX_VALUE = 400

_ADVICE: dict[Pattern, str] = {
    "timestamp": "move the time behind what stays the same, into the last message, or round it to the day",
    "id": "leave the id out, or move it behind what stays the same, into the last message",
    "reordered_tools": "send the tools in the same order each time, such as sorted by name",
    "reserialised_tools": "write the tools' JSON once and send the same text each time: keys in one order, no other "
    "spacing or escapes",
    "changed_tools": "offer the same tools in every request of a conversation, and limit the choice by tool_choice; a "
    "new tool goes behind the others; tool_choice none leaves all of them out",
    "stripped_thinking": "send the assistant's turn back with its thinking, if the chat template keeps it; without it "
    "everything behind is computed anew",
    "retokenised_answer": "send the answer's own token ids (return_token_ids), or its text as a turn of its own and "
    "unchanged, so that the server finds the ids that it was generated as",
    "cut_history": "send all that was said before; if it must become shorter, cut much of it at once and seldom",
    "edited_text": "send what was said before exactly as it was, and put what is new behind it",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake. detail: what of the values differs, to be told with the advice; may be empty."""

    pattern: Pattern
    where: Where
    detail: str = ""


def may_be_fault(comparison: Comparison) -> bool:
    """Whether find_fault could find one somewhere: it spares others the search for the place."""
    texts = comparison.prompt.text, comparison.cached.text
    return (
        comparison.is_last_turn
        or comparison.joins_again(_MIN_SAME_CALL) is not None
        or comparison.turns_alike(0, 1) != []
        or comparison.change.is_rejoined
        or comparison.num_equal_words_behind > 0
        or is_respelled(comparison)
        or _is_retokenised(comparison)
        or lacks_thinking(*_turns(comparison))
        or _value(comparison, comparison.change) is not None
        or tool_change(*texts, comparison.num_equal_characters, is_cut=comparison.is_cut) is not None
    )


def find_fault(
    comparison: Comparison, prompt: DiagnosedPrompt, place: Place, *, is_untaken: bool = False
) -> Fault | None:
    """Return the mistake by which a prompt leaves a cached one; None if it just goes on otherwise.

    place: of the first difference. is_untaken: nobody is known to have gone on from what is cached there, and nothing
    of the prompt behind it is known to have been cached.
    """
    conversation = prompt.conversation
    num_messages = None if conversation is None else len(conversation.messages)
    if conversation is not None and is_answer_left_out(comparison, conversation, place, is_untaken=is_untaken):
        return Fault("cut_history", place.where)
    if place.is_at_end and num_messages != 1:
        return None
    changed_tools = _changed_tools(comparison, conversation)
    if changed_tools is not None:
        return changed_tools
    if place.where in ("assistant", "prompt") and _is_retokenised(comparison):
        return Fault("retokenised_answer", place.where)
    if place.where == "assistant" and lacks_thinking(*_turns(comparison)):
        return Fault("stripped_thinking", place.where)
    is_instructions = place.where in ("system", "template")
    # Where nothing shows the ends of messages, the prompt is one text too, but for what leads it.
    if num_messages is None or num_messages == 1 or not (comparison.has_turns or is_instructions):
        return _fault_of_text(comparison, place.where)
    fault = _fault_of_turn(comparison, place)
    if fault is None and place.where == "assistant" and conversation is not None:
        pattern = answer_pattern(comparison, conversation, place, is_untaken=is_untaken)
        return None if pattern is None else Fault(pattern, place.where)
    return fault


def _fault_of_turn(comparison: Comparison, place: Place) -> Fault | None:
    """Return the mistake in a message of several, of which more is the same in both behind the difference."""
    is_instructions = place.where in ("system", "template")
    if comparison.num_equal_words_behind >= _MIN_SAME_REST:
        return Fault("edited_text", place.where)
    change = comparison.change
    if _is_history_cut(comparison, change):
        return Fault("cut_history", place.where)
    joint = comparison.joins_again(_MIN_SAME_TALK) if is_instructions or place.message_index == 0 else None
    if joint is not None:
        patterns: dict[tuple[int, int], Pattern] = {
            (1, 1): _pattern(comparison, change),
            (0, 1): "cut_history",
            (1, 0): "edited_text",
        }
        return Fault(patterns[joint], place.where)
    if is_instructions:
        is_fault = _is_same_instructions(comparison, change)
    elif place.where == "assistant":
        is_fault = _is_same_conversation(comparison, change)
    else:
        # Questions are often of one form, but the answers to them are not.
        is_answered = comparison.agrees_after(comparison.turn, comparison.turn)
        is_fault = is_answered and _is_same_conversation(comparison, change)
    if is_fault and place.where == "assistant" and pattern_of_change(comparison) == "cut_history":
        return Fault("cut_history", place.where)
    return Fault(_pattern(comparison, change), place.where) if is_fault else None


def describe(fault: Fault, comparison: Comparison, place: Place) -> Divergence:
    """Return a fault as callers get it."""
    advice = _ADVICE[fault.pattern]
    cached_text, prompt_text = comparison.texts_around()
    return Divergence(
        position=comparison.position,
        message_index=None if fault.where == "tools" else place.message_index,
        where=fault.where,
        cached_text=cached_text,
        prompt_text=prompt_text,
        pattern=fault.pattern,
        advice=f"{fault.detail}; {advice}" if fault.detail else advice,
    )


def _changed_tools(comparison: Comparison, conversation: Conversation | None) -> Fault | None:
    texts = comparison.prompt.text, comparison.cached.text
    change = tool_change(*texts, comparison.num_equal_characters, is_cut=comparison.is_cut)
    if change is None:
        return None
    has_calls = conversation is not None and any(message.tool_calls for message in conversation.messages)
    is_same_talk = comparison.joins_again(_MIN_SAME_CALL if has_calls else _MIN_SAME_TALK) is not None
    if change.is_fault or is_same_talk or comparison.num_shared_words >= _MIN_SAME_CONVERSATION:
        return Fault(change.pattern, "tools", _tool_names(change))
    return None


def _tool_names(change: ToolChange) -> str:
    parts = [("added: ", change.added), ("gone: ", change.removed)]
    return ", ".join(word + names(tools) for word, tools in parts if tools)


def _is_retokenised(comparison: Comparison) -> bool:
    """Whether the text goes on as the cached one does, to the end of its turn, in other tokens."""
    cached = comparison.cached
    end = cached.end_of_turn(comparison.offset)
    # Of a character that is still to come, any two show the same.
    is_seen = cached.text[comparison.offset : end].strip("\ufffd \n") != ""
    return is_seen and comparison.num_cached_left >= _MIN_RETOKENISED and comparison.num_equal_characters >= end


def _turns(comparison: Comparison) -> tuple[str, str]:
    """Return the turns of prompt and cached one that the first difference is in."""
    position = comparison.num_equal_characters
    return _turn(comparison.prompt, position), _turn(comparison.cached, position)


def _turn(passage: Passage, position: int) -> str:
    return passage.text[passage.start_of_turn(position) : passage.end_of_turn(position)]


def _is_history_cut(comparison: Comparison, change: Change) -> bool:
    """Whether the prompt goes on with what the cached one says later."""
    if comparison.num_shared_words < _MIN_CUT_HISTORY:
        return False
    return comparison.is_said_later or (change.num_cached_turns > change.num_turns and comparison.is_rejoined_later)


def _fault_of_text(comparison: Comparison, where: Where) -> Fault | None:
    """Return the mistake in a prompt that is one text: most of what follows is the same again."""
    if comparison.num_equal_words_behind >= _MIN_SAME_CONVERSATION:
        return Fault("edited_text", where)
    change = comparison.change
    num_left = len(comparison.cached.words) - comparison.num_equal_words
    num_shared = comparison.num_shared_words
    if num_shared < _MIN_SAME_CONVERSATION or 2 * num_shared < num_left:
        return None
    return Fault(_pattern(comparison, change), where)


def _num_changed(change: Change) -> int:
    return max(change.end - change.begin, change.cached_end - change.begin)


def _is_same_instructions(comparison: Comparison, change: Change) -> bool:
    """Whether two system prompts are the same but for a small part."""
    words, cached_words = comparison.rest_of_turn
    num_changed = _num_changed(change)
    num_rejoined = max(len(words), len(cached_words)) - num_changed
    if _value(comparison, change) is not None:
        is_to_the_end = num_changed == max(len(words), len(cached_words))
        if (change.is_rejoined and num_rejoined > 0) or (is_to_the_end and comparison.num_words_before > num_changed):
            return True
    is_small = num_changed <= comparison.num_words_before + num_rejoined
    return is_small and max(num_rejoined, comparison.num_shared_words) >= _MIN_SAME_INSTRUCTIONS


def _is_same_conversation(comparison: Comparison, change: Change) -> bool:
    """Whether a message that is not the last was changed in what else is the same conversation."""
    if not change.is_rejoined:
        return False
    if comparison.num_shared_words >= _MIN_SAME_CONVERSATION:
        return True
    words, cached_words = comparison.rest_of_turn
    num_rejoined = min(len(words), len(cached_words)) - _num_changed(change)
    is_small = _num_changed(change) <= comparison.num_words_before + max(num_rejoined, 0)
    return is_small and max(num_rejoined, comparison.num_shared_words) >= _MIN_SAME_REST


def _pattern(comparison: Comparison, change: Change) -> Pattern:
    return _value(comparison, change) or "edited_text"


def _value(comparison: Comparison, change: Change) -> Pattern | None:
    """Return what kind of value differs, if it is one."""
    first = Change(change.begin, change.begin + 1, change.begin + 1, 0, 0, is_rejoined=False)
    for part in (change, first):
        pattern = pattern_of_value(
            _excerpt(comparison.prompt, part.begin, part.end), _excerpt(comparison.cached, part.begin, part.cached_end)
        )
        if pattern is not None:
            return pattern
    return None


def _excerpt(passage: Passage, begin: int, end: int) -> Excerpt:
    """Return words of a passage and the text around them."""
    ends = passage.ends[begin:end]
    start = passage.starts[begin] if begin < len(passage.starts) else len(passage.text)
    stop = min(ends[-1], start + _MAX_VALUE) if ends else start
    first = max(start - _NUM_AROUND, 0)
    return Excerpt(passage.text[first : stop + _NUM_AROUND], start - first, stop - first)
