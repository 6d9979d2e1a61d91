"""The messages of a request as token ids."""

from collections.abc import Sequence
from typing import Any

from radixserve.api.requests import BeamSearchRequest, ChatRequest, ExplainRequest, TokenizeRequest, WarmRequest
from radixserve.errors import InvalidRequest
from radixserve.tokenizer.answer_turns import AnswerLookup
from radixserve.tokenizer.chat_encoder import ChatOptions
from radixserve.tokenizer.digit_marks import TextEnd
from radixserve.tokenizer.encoded_chat import EncodedChat
from radixserve.tokenizer.messages import Message, template_messages
from radixserve.tokenizer.tokenizer import Tokenizer

ChatOptionFields = ChatRequest | TokenizeRequest | BeamSearchRequest | WarmRequest | ExplainRequest

_RESERVED_TEMPLATE_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def encode_messages(
    messages: list[Message],
    options: ChatOptionFields,
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]] | None = None,
    answers: AnswerLookup | None = None,
) -> list[int]:
    """Return the token ids of a conversation, as encode_messages_with_ends does."""
    return encode_messages_with_ends(messages, options, tokenizer, (), tools, answers).token_ids


def encode_messages_with_ends(
    messages: list[Message],
    options: ChatOptionFields,
    tokenizer: Tokenizer,
    ends: Sequence[TextEnd],
    tools: list[dict[str, Any]] | None = None,
    answers: AnswerLookup | None = None,
) -> EncodedChat:
    """Return the token ids of a conversation, open for the assistant's answer unless the options say otherwise.

    ends: places in the messages to find in the prompt.

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
        encoded = tokenizer.encode_chat_with_ends(
            template_messages(messages),
            ChatOptions(
                tools=tools,
                add_generation_prompt=(
                    not continues if options.add_generation_prompt is None else options.add_generation_prompt
                ),
                continue_final_message=continues,
                template_kwargs=template_kwargs,
            ),
            ends,
            answers,
        )
    except RecursionError:
        raise InvalidRequest(
            "messages, tools or chat_template_kwargs are nested too deeply", param="messages"
        ) from None
    if not encoded.token_ids:
        raise InvalidRequest("the chat template makes an empty prompt of these messages", param="messages")
    return encoded
