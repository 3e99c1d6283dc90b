"""A request's body: read within limits, and taken for JSON only where all of it is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from qwen35_jax.inference.chat.argument_types import read_json
from qwen35_jax.inference.server.api_error import ApiError, shown

DEEPEST = 64
"""Levels of objects and lists in one another. Schemas have about ten; what comes after would only exhaust a stack."""

BODY_SECONDS = 60.0
_KINDS = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


async def read_body(request: Request, most: int) -> bytes:
    """The body of a POST.

    Args:
        request: of which nothing has been read.
        most: bytes that it may have.

    Raises:
        ApiError: it is larger, says that it is no JSON, or takes a minute to arrive.
        ClientDisconnect: the client went away before all of it had come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also what keeps web pages of other sites from posting here: a browser asks before it sends this type.
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(f"the content type is {shown(kind) if kind else 'missing'}, expected application/json")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
    return bytes(body)


def parse_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: it is no UTF-8, no JSON, no object, nested too deeply, or holds half a character of UTF-16.
    """
    try:
        content = read_json(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from error
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):  # what the interpreter advises is not for clients
            raise ApiError(
                f"the body holds a number of more than {sys.get_int_max_str_digits()} digits"
            ) from error
        raise ApiError(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ApiError(f"the body is a JSON {_KINDS[type(content)]}, expected an object")
    _check_values(content)
    return content


def _check_values(content: Any) -> None:
    ahead = [(content, 1)]
    while ahead:
        value, depth = ahead.pop()
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, dict | list):
            if depth > DEEPEST:
                raise ApiError(f"the body is nested more than {DEEPEST} levels deep")
            if isinstance(value, dict):
                for key in value:
                    _check_text(key)
            parts = value.values() if isinstance(value, dict) else value
            ahead += [(part, depth + 1) for part in parts if isinstance(part, str | dict | list)]


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(
            f"the body holds half a character: {text[error.start]!a}, a surrogate that has no partner"
        ) from error


def _too_large(most: int) -> ApiError:
    return ApiError(f"the body is larger than {most} bytes, which is the most taken here", status=413)
