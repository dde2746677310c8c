"""Limits of a request, and API keys: what protects the engine from untrusted clients.

Everything that a client can make grow has a limit here or in `serve.sampling`. Whatever is raised while answering
becomes an `ApiError` with the body that OpenAI's clients expect; no traceback leaves the server. This module knows no
engine.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tonnage.errors import TonnageError
from tonnage.units import KIB, MIB


class ApiError(TonnageError):
    """A request that fails, and why."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)


def unavailable(message: str, *, retry_after_s: int = 1, code: str = "unavailable") -> ApiError:
    """Return a 503 error: the server cannot answer now, and it is not the client's fault."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, kind="service_unavailable_error", code=code, headers=headers)


HEADER_BYTES = 32 * KIB
BODY_S = 60.0
MOST_PROMPTS = 128
MOST_CHOICES = 256  # prompts × n
MOST_MESSAGES = 4096
MOST_PROMPT_TOKENS = 2**21
# A prompt with more characters per context token is refused before it is encoded.
_CHARACTERS_PER_TOKEN = 32
_SMALLEST_BODY = 16 * MIB


def most_body_bytes(context: int) -> int:
    """Return the largest request body: room for lists of prompts, or one prompt of a very long context."""
    return max(_SMALLEST_BODY, 32 * context)


def check_characters(count: int, context: int, param: str) -> None:
    """Refuse by length alone what cannot fit, since encoding takes time."""
    if count > _CHARACTERS_PER_TOKEN * context:
        message = f"{param} has {count:,} characters, far more than the context of {context:,} tokens holds."
        raise ApiError(400, message, param=param, code="context_length_exceeded")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Read the whole body, which must be declared as JSON, small enough, and arrive in time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"The body's content type is {kind[:80]!r}; send application/json.")
    packed = request.headers.get("content-encoding", "").strip().lower()
    if packed not in ("", "identity"):
        raise ApiError(415, f"The body's content encoding is {packed[:80]!r}; send it as it is.")
    too_large = ApiError(413, f"The body is larger than {most_bytes // MIB} MiB.", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {BODY_S:.0f} seconds.") from None
    except ClientDisconnect:
        raise ApiError(499, "The client has gone.") from None
    return bytes(body)


class Keys:
    """The accepted API keys; without any, the server is open to all."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def tenant(self, authorization: bytes) -> str | None:
        """Return an id for the owner of a key, or None if it is wrong. Takes constant time."""
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex() if any(matches) and scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def salt_of(tenant: str, cache_salt: str | None, user: str | None) -> str:
    """Return a salt so that only requests with all three equal share cached prefixes, which timing could reveal."""
    parts = [tenant, cache_salt or "", user or ""]
    return _digest(json.dumps(parts).encode()).hex() if any(parts) else ""


# What probes, load balancers and Prometheus ask for, which have no key; vLLM leaves these open, too.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})


class AccessMiddleware:
    """Middleware that checks every request first, including those for unknown routes."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the headers' size and the key, and record its tenant."""
        if scope["type"] == "http":
            lengths = (len(name) + len(value) for name, value in scope["headers"])
            authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            error = None
            tenant = "" if scope["path"] in OPEN_PATHS else self._keys.tenant(authorization)
            # The parser only limits incomplete headers.
            if sum(lengths) + len(scope["raw_path"]) + len(scope["query_string"]) > HEADER_BYTES:
                error = ApiError(431, f"The headers are larger than {HEADER_BYTES // KIB} KiB.")
            elif tenant is None:
                error = ApiError(
                    401, "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                    kind="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
            else:
                scope.setdefault("state", {})["tenant"] = tenant
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
