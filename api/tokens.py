"""POST /tokenize and /detokenize."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixserve.api.incoming import Incoming, receive
from radixserve.api.messages import encode_messages
from radixserve.api.options import namespace_of
from radixserve.api.prompts import check_prompt_or_messages, check_token_ids
from radixserve.api.requests import DetokenizeRequest, TokenizeRequest
from radixserve.api.responses import Detokenized, Tokenized
from radixserve.api.tools import check_tools
from radixserve.errors import InvalidRequest
from radixserve.tokenizer.tools import template_tools


async def tokenize(request: Request) -> Response:
    """Count and list the tokens of a text, or of messages as chat would send them to the model."""
    incoming = await receive(request)
    return Response(await incoming.in_worker(_tokenize), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    incoming = await receive(request)
    return Response(await incoming.in_worker(_detokenize), media_type="application/json")


def _tokenize(incoming: Incoming) -> bytes:
    service, ready = incoming.service, incoming.ready
    request = incoming.decode(TokenizeRequest)
    check_prompt_or_messages(request.prompt, request.messages)
    namespace = namespace_of(incoming, request.cache_salt)
    tokenizer = service.engine.tokenizer
    if request.messages is not None:
        if request.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is for a prompt; the chat template writes those of messages",
                param="add_special_tokens",
            )
        functions = check_tools(request.tools, request.tool_choice)
        answers = service.answer_memory.lookup(namespace)
        token_ids = encode_messages(request.messages, request, tokenizer, template_tools(functions), answers)
    else:
        adds_special_tokens = request.add_special_tokens is not False
        token_ids = tokenizer.encode(request.prompt or "", add_special_tokens=adds_special_tokens)
    return msgspec.json.encode(Tokenized(len(token_ids), ready.max_model_len, token_ids))


def _detokenize(incoming: Incoming) -> bytes:
    request = incoming.decode(DetokenizeRequest)
    check_token_ids(request.tokens, "tokens", incoming.ready.vocab_size)
    text = incoming.service.engine.tokenizer.decode(
        request.tokens, skip_special_tokens=request.skip_special_tokens or False
    )
    return msgspec.json.encode(Detokenized(text))
