"""Who may ask: clients that know the key, and no web page that a browser was led to."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen35_jax.inference.server.api_error import ApiError
from qwen35_jax.inference.server.request_record import record_of
from qwen35_jax.inference.server.responses import error_response

GUARDED = "/v1/"


class Access:
    """Refuses what may not be asked.

    Args:
        app: that answers the rest.
        api_key: that requests below `/v1/` have to bring, where there is one.
        local: whether only this machine can reach the server. Without a key, it then has to be called by a name of
            this machine: a web page can have its own name point here, and would be let in as if it were from here.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, local: bool):
        self._app = app
        self._api_key = api_key
        self._by_local_names = local and api_key is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._objection(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _objection(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._by_local_names and not _names_this_machine(headers.get("host", "")):
            return ApiError(
                "the host of this request is not this machine, and the server is for this machine only: "
                "call it localhost, or start it with --api-key-file",
                code="unknown_host",
            )
        if self._api_key is None or not scope["path"].startswith(GUARDED):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Headers come as Latin-1, and keys are ASCII: encoding is what the comparison needs, and fails on nothing.
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._api_key.encode()):
            return None
        record_of(scope).endpoint = GUARDED
        complaint = "is missing" if not key else "is wrong"
        return ApiError(
            f"the API key {complaint}: send it in the header 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
        )


def _names_this_machine(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)  # no name at all: nothing that could point anywhere else
    except ValueError:
        return False
    return True
