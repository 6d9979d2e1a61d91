"""The messages of a request as token ids."""

from typing import Any

from radixserve.api.requests import BeamSearchRequest, ChatRequest, ExplainRequest, TokenizeRequest
from radixserve.errors import InvalidRequest
from radixserve.tokenizer.answer_turns import AnswerLookup
from radixserve.tokenizer.messages import Message, template_messages
from radixserve.tokenizer.tokenizer import Tokenizer

_RESERVED_TEMPLATE_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def encode_messages(
    messages: list[Message],
    options: ChatRequest | TokenizeRequest | BeamSearchRequest | ExplainRequest,
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]] | None = None,
    answers: AnswerLookup | None = None,
) -> list[int]:
    """Return the token ids of a conversation, open for the assistant's answer unless the options say otherwise.

    tools: those that the model may call, as chat templates take them.
    continue_final_message leaves the last message open, so it turns add_generation_prompt off where that is not given.
    answers: finds the ids to use for an assistant's turn that is exactly an earlier answer.
    Raises InvalidRequest for messages and options that do not go together, and for those that the chat template refuses
    or makes nothing of.
    """
    continues = options.continue_final_message or False
    if continues and messages and messages[-1].tool_calls:
        raise InvalidRequest(
            "continue_final_message needs a last message that is text; this one ends with tool calls",
            param="continue_final_message",
        )
    template_kwargs = options.chat_template_kwargs or {}
    if reserved := template_kwargs.keys() & _RESERVED_TEMPLATE_NAMES:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {min(reserved)}; the request has a field for it",
            param="chat_template_kwargs",
        )
    try:
        token_ids = tokenizer.encode_chat(
            template_messages(messages),
            tools=tools,
            add_generation_prompt=(
                not continues if options.add_generation_prompt is None else options.add_generation_prompt
            ),
            continue_final_message=continues,
            template_kwargs=template_kwargs,
            answers=answers,
        )
    except RecursionError:
        raise InvalidRequest(
            "messages, tools or chat_template_kwargs are nested too deeply", param="messages"
        ) from None
    if not token_ids:
        raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
    return token_ids
