"""The fields that the server knows of but does not act on: refused by name, or accepted with a reason."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from radixserve.errors import InvalidRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that would change the answer, or promises something. neutral: the values that ask for nothing."""

    meaning: str
    neutral: tuple[Any, ...] = ()


# null is always neutral.
UNSUPPORTED_FIELDS = {
    "audio": UnsupportedField("asks for sound"),
    "cache_control": UnsupportedField("keeps the prompt up to a content part, and belongs on that part"),
    "chat_template": UnsupportedField("replaces the model's chat template for one request"),
    "documents": UnsupportedField("adds documents to the prompt", ([],)),
    "function_call": UnsupportedField("chooses a function", ("none", "auto")),
    "functions": UnsupportedField("offers functions to the model", ([],)),
    "guided_choice": UnsupportedField("limits the answer to choices, as structured_outputs.choice does"),
    "guided_grammar": UnsupportedField("limits the answer to a grammar, as structured_outputs.grammar does"),
    "guided_json": UnsupportedField("limits the answer to a JSON schema, as structured_outputs.json does"),
    "guided_regex": UnsupportedField("limits the answer to a regular expression, as structured_outputs.regex does"),
    "modalities": UnsupportedField("asks for other answers than text", (["text"], [])),
    "prompt_cache_breakpoint": UnsupportedField("keeps the prompt up to a content part, and belongs on that part"),
    "session_id": UnsupportedField("ties requests to a session"),
    "suffix": UnsupportedField("asks for text between prompt and suffix", ("",)),
    "web_search_options": UnsupportedField("asks for a web search"),
}

# These change no answer, here or elsewhere: clients send them as a matter of course.
NO_OP_FIELDS = {
    "metadata": "a label for a store of answers; nothing is stored here",
    "prediction": "a hint for speed",
    "prompt_cache_key": "a hint for routing to a cache; prefixes are found by their tokens",
    "reasoning_effort": "the models served here have no levels of effort",
    "safety_identifier": "names an end user",
    "service_tier": "there is one tier",
    "store": "nothing is stored here",
    "user": "names an end user",
    "verbosity": "the models served here have no levels of verbosity",
}


class FieldCheck:
    """Checks the fields of requests, and remembers which unknown ones it has logged."""

    # A caller chooses the names, so what is remembered of them is bounded, in number and in length.
    MAX_LOGGED = 256
    MAX_NAME_LENGTH = 64

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def check(self, fields: Mapping[str, msgspec.Raw], *, known: Collection[str]) -> None:
        """Refuse fields that are not supported yet, unless their value asks for nothing; log unknown ones once each.

        fields: a request's own, undecoded. known: those that the request's type reads; they are not looked at.
        Raises InvalidRequest with the field's name as param.
        """
        for name in fields.keys() - known:
            if name in UNSUPPORTED_FIELDS:
                _check_neutral(name, msgspec.json.decode(fields[name]))
            elif name not in NO_OP_FIELDS:
                self._log_unknown(name[: self.MAX_NAME_LENGTH])

    def _log_unknown(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < self.MAX_LOGGED:
            self._logged.add(name)
            logger.warning("ignoring the unknown request field %r", name)


def asks_for_nothing(value: Any, neutral: Collection[Any]) -> bool:
    """Return whether a field's value is null or one of the neutral ones."""
    # bool is compared by type as well, since False == 0 in Python and not in JSON.
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )


def _check_neutral(name: str, value: Any) -> None:
    field = UNSUPPORTED_FIELDS[name]
    if not asks_for_nothing(value, field.neutral):
        raise InvalidRequest(f"{name} is not supported here (it {field.meaning}); leave it out", param=name)
