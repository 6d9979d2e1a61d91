"""Answers that come back in a conversation otherwise than they were given, or not at all."""

from radixserve.diagnosis.comparison import Comparison
from radixserve.diagnosis.prompt import Conversation, Place
from radixserve.diagnosis.report import Pattern
from radixserve.errors import InvalidRequest

# An answer that lacks fewer words at its end may have been stopped by its reader while the model still wrote.
_MIN_CUT_WORDS = 4
# Words of the next question and its answer: what was said before them is the same already.
_MIN_SAME_WORDS = 4


def answer_pattern(
    comparison: Comparison, conversation: Conversation, place: Place, *, is_untaken: bool
) -> Pattern | None:
    """Return how an answer that is not the last message differs from the cached one; None if it may just be another.

    is_untaken: as in find_fault.
    """
    pattern = pattern_of_change(comparison)
    if comparison.joins_again(_MIN_SAME_WORDS) is not None:
        return pattern
    _, num_cached_words = comparison.num_words_behind
    # An answer that comes back as far as it has words costs nothing, as the next turn is new.
    if num_cached_words == 0:
        return None
    # The server may have given several answers here, and this is one of them.
    if _is_known(comparison, conversation):
        return None
    if is_respelled(comparison):
        return pattern
    if not is_untaken:
        return None
    if place.message_index is not None and conversation.messages[place.message_index].tool_calls:
        return "edited_text"
    is_stopped = pattern == "cut_history" and comparison.words_of_turn[0] != [] and num_cached_words < _MIN_CUT_WORDS
    return None if is_stopped else pattern


def pattern_of_change(comparison: Comparison) -> Pattern:
    """Return what became of a cached answer: its end is missing, or it says something else."""
    num_words, num_cached_words = comparison.num_words_behind
    return "cut_history" if num_words == 0 < num_cached_words else "edited_text"


def is_respelled(comparison: Comparison) -> bool:
    """Whether the turns that differ say the same, in other letters or with other white space."""
    words, cached_words = comparison.words_of_turn
    # The cached one may lack its last token.
    is_whole = cached_words != [] and len(words) - len(cached_words) in (0, 1)
    return is_whole and "".join(words).casefold().startswith("".join(cached_words).casefold())


def is_answer_left_out(comparison: Comparison, conversation: Conversation, place: Place, *, is_untaken: bool) -> bool:
    """Whether the prompt has a question, or a tool's result, where the cached one has the answer to the one before.

    is_untaken: as in find_fault.
    """
    index, messages = place.message_index, conversation.messages
    if not index:
        return False
    roles = messages[index - 1].role, messages[index].role
    if roles not in (("user", "user"), ("user", "tool"), ("tool", "user")):
        return False
    try:
        opening = conversation.encode(messages[:index])[conversation.num_cut_tokens :]
    except InvalidRequest:
        return False
    is_answered = len(comparison.cached_words_behind(opening)) >= _MIN_CUT_WORDS
    return is_answered and (is_untaken or len(comparison.turns_alike(0, 1)) > 0)


def _is_known(comparison: Comparison, conversation: Conversation) -> bool:
    """Whether the turn is an answer of this server's."""
    said = comparison.prompt.text_of_turn(comparison.num_equal_characters)
    # Templates write white space in front.
    starts = range(len(said) - len(said.lstrip()) + 1)
    return any(conversation.is_answer(said[start:]) for start in starts)
