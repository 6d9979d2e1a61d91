"""Request bodies: read them within a limit, decode them strictly, say what is wrong and where."""

import json
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from radixserve.api.fields import FieldCheck
from radixserve.errors import BodyTooLarge, InvalidRequest

MAX_BODY_BYTES = 16 * 2**20

T = TypeVar("T", bound=msgspec.Struct)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALIDATION_MESSAGE = re.compile(r"(?P<problem>.*) - at (?:`key` in )?`(?P<path>\$(?:\.(?P<field>\w+))?.*)`", re.DOTALL)


async def read_body(request: Request) -> bytes:
    """Return the body. Raises BodyTooLarge as soon as it is known to be over MAX_BODY_BYTES."""
    announced = request.headers.get("content-length", "")
    # Eighteen digits: far beyond the limit, and a length that int() takes without complaint.
    if announced.isdecimal() and int(announced[:18]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"the body is over {MAX_BODY_BYTES} bytes; send a shorter prompt")


def decode_body(body: bytes, shape: type[T], field_check: FieldCheck) -> T:
    """Decode a JSON object into a request. The content type is not looked at; of a repeated key the last one counts.

    Raises InvalidRequest, with the JSON path in the message and the field as param, for a wrong type, a number that
    JSON does not have (NaN, infinities), and a known field that is not supported yet.
    """
    try:
        # msgspec does not look inside the strings that it skips.
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        field_check.check(_FIELDS.decode(body), known=shape.__struct_fields__)
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _invalid_value(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _invalid_value(message: str) -> InvalidRequest:
    match = _VALIDATION_MESSAGE.fullmatch(message)
    if match is None:
        return InvalidRequest(f"the body must be a JSON object: {message}")
    return InvalidRequest(f"{match['path']}: {match['problem']}", param=match["field"])


def _malformed(body: bytes, message: str) -> InvalidRequest:
    if not body.strip():
        return InvalidRequest("the body is empty; send a JSON object")
    path = _find_non_finite(body)
    if path is None:
        return InvalidRequest(f"the body is not valid JSON: {message}")
    return InvalidRequest(f"$.{'.'.join(path)}: NaN and infinities are not numbers in JSON", param=path[0])


class _NonFinite:
    """Stands for a NaN or an infinity in a parsed body."""


def _find_non_finite(body: bytes) -> list[str] | None:
    """Return the keys that lead to the first NaN, Infinity or -Infinity; None if the body has other faults."""
    try:
        return _path_to_non_finite(json.loads(body, parse_constant=lambda _: _NonFinite())) or None
    except (ValueError, RecursionError):
        return None


def _path_to_non_finite(value: Any) -> list[str] | None:
    """Look depth first and remember the path alone: a list of all values would take gigabytes for a large body."""
    if isinstance(value, _NonFinite):
        return []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        if isinstance(child, dict | list | _NonFinite) and (path := _path_to_non_finite(child)) is not None:
            return [str(key), *path]
    return None
