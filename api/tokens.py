"""POST /tokenize and /detokenize."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixserve.api.body import decode_body, read_body
from radixserve.api.messages import encode_messages
from radixserve.api.prompts import check_token_ids
from radixserve.api.requests import DetokenizeRequest, TokenizeRequest
from radixserve.api.responses import Detokenized, Tokenized
from radixserve.api.service import Service, service_of
from radixserve.api.tools import check_tools, template_tools
from radixserve.errors import InvalidRequest
from radixserve.protocol import EngineReady


async def tokenize(request: Request) -> Response:
    """Count and list the tokens of a text, or of messages as chat would send them to the model."""
    service = service_of(request)
    ready = service.ready()
    body = await read_body(request)
    return Response(await service.run_in_worker(_tokenize, body, service, ready), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    service = service_of(request)
    ready = service.ready()
    body = await read_body(request)
    return Response(await service.run_in_worker(_detokenize, body, service, ready), media_type="application/json")


def _tokenize(body: bytes, service: Service, ready: EngineReady) -> bytes:
    request = decode_body(body, TokenizeRequest, service.field_check)
    service.check_model(request.model, ready)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    tokenizer = service.engine.tokenizer
    if request.messages is not None:
        if request.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is for a prompt; the chat template writes those of messages",
                param="add_special_tokens",
            )
        functions = check_tools(request.tools, request.tool_choice)
        token_ids = encode_messages(request.messages, request, tokenizer, template_tools(functions))
    else:
        adds_special_tokens = request.add_special_tokens is not False
        token_ids = tokenizer.encode(request.prompt or "", add_special_tokens=adds_special_tokens)
    return msgspec.json.encode(Tokenized(len(token_ids), ready.max_model_len, token_ids))


def _detokenize(body: bytes, service: Service, ready: EngineReady) -> bytes:
    request = decode_body(body, DetokenizeRequest, service.field_check)
    service.check_model(request.model, ready)
    check_token_ids(request.tokens, "tokens", ready.vocab_size)
    text = service.engine.tokenizer.decode(request.tokens, skip_special_tokens=request.skip_special_tokens or False)
    return msgspec.json.encode(Detokenized(text))
