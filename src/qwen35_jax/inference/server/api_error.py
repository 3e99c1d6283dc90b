"""Errors as the OpenAI API tells them: a status, and an object that names the field."""

from __future__ import annotations

import json
from typing import Any

from qwen35_jax.errors import NonFiniteError, QueueFullError, Qwen35Error
from qwen35_jax.inference.chat.messages import MessageError

RETRY_AFTER_SECONDS = 1
_LONGEST_MESSAGE = 600
_LONGEST_FIELD = 100
_LONGEST_VALUE = 60


class ApiError(Qwen35Error):
    """A request that gets no answer.

    Attributes:
        status: of HTTP.
        kind: `type` in the API's error object.
        param: the field that is at fault, where one is.
        code: what programs tell errors apart by, where the API has one.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = None if param is None else param[:_LONGEST_FIELD]
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """That go with the status."""
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_AFTER_SECONDS)}
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {}

    def body(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > _LONGEST_MESSAGE:  # it may quote what the client sent
            message = message[:_LONGEST_MESSAGE] + "..."
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}


def field_error(field: str, complaint: str, *, code: str = "invalid_value") -> ApiError:
    """A field of a request that cannot be taken: `complaint` goes on from its name."""
    return ApiError(f"{field} {complaint}", param=field, code=code)


def shown(value: Any) -> str:
    """A value of a request in an error, as JSON has it and cut short: it may be anything."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[: _LONGEST_VALUE // 2]}...{text[-_LONGEST_VALUE // 2 + 3 :]}"


def as_api_error(error: Qwen35Error) -> ApiError:
    """What a client is told of an error of this package."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, kind="rate_limit_error", code="queue_full")
    if isinstance(error, MessageError):
        return field_error(error.field, str(error).removeprefix(error.field).lstrip())
    if isinstance(error, NonFiniteError):
        return ApiError(str(error), status=500, kind="server_error", code="model_broken")
    return ApiError(str(error), code="invalid_value")


def unavailable(message: str) -> ApiError:
    """The server cannot answer now, whatever the request."""
    return ApiError(message, status=503, kind="server_error", code="unavailable")
