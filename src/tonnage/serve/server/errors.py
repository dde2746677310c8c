"""Errors as OpenAI's clients expect them: a status, and a body `{"error": {message, type, param, code}}`.

Whatever is raised while answering becomes one of these; no traceback leaves the server.
"""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from tonnage.errors import TonnageError


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
