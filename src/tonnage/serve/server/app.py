"""The routes: OpenAI's, health, metrics, the ledger. Failures have OpenAI's format; no URL is fetched for a client."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse

from tonnage import __version__
from tonnage.report.serve import card_figures, kv_figures
from tonnage.serve.server.answers import ChatFormat, Format, JsonObject
from tonnage.serve.server.generation import Generation, explained, respond
from tonnage.serve.server.limits import (
    AccessMiddleware,
    ApiError,
    Keys,
    check_characters,
    most_body_bytes,
    read_body,
    salt_of,
    unavailable,
)
from tonnage.serve.server.metrics import Metrics
from tonnage.serve.server.schemas import ChatRequest, CompletionRequest, GenerationRequest, parse
from tonnage.serve.server.worker import Worker
from tonnage.serve.stats import EngineState
from tonnage.serve.text import Tokenizer

_log = logging.getLogger(__name__)
# Shorter texts are encoded inline: handing them to a thread takes longer.
_SHORT_TEXT = 4096
_LOOK_S = 10.0
_DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class Service:
    """What the routes need."""

    worker: Worker
    model: str
    context: int
    vocab: int
    tokenizer: Tokenizer | None
    metrics: Metrics = field(init=False)
    started_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.model)

    async def state(self) -> EngineState:
        """Return the engine's current state; raises `unavailable` if the engine hangs."""
        try:
            async with asyncio.timeout(_LOOK_S):
                return await self.worker.look(EngineState.of)
        except TimeoutError:
            raise unavailable("The engine does not answer.") from None

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = parse(CompletionRequest, await read_body(request, most_body_bytes(self.context)))
        self._check(body)
        prompts = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                check_characters(len(prompt), self.context, "prompt")
                encode = self._text_tokenizer("prompt").encode
                prompt = encode(prompt) if len(prompt) <= _SHORT_TEXT else await asyncio.to_thread(encode, prompt)
            elif max(prompt, default=0) >= self.vocab:
                raise ApiError(400, f"Token ids of this model are below {self.vocab}.", param="prompt")
            prompts.append(prompt)
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return await self._generate(request, body, prompts, max_tokens, Format)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = parse(ChatRequest, await read_body(request, most_body_bytes(self.context)))
        self._check(body)
        words = [message.words for message in body.messages]
        check_characters(sum(len(text) for each in words for text in each.values()), self.context, "messages")
        with explained():
            prompt = await asyncio.to_thread(self._text_tokenizer("messages").chat, words)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return await self._generate(request, body, [prompt], self.context if asked is None else asked, ChatFormat)

    def _check(self, body: GenerationRequest) -> None:
        """Reject a wrong model or a full queue before the work of encoding."""
        with explained():
            self.worker.check_room(1)
        if body.model != self.model:
            message = f"The model {body.model[:80]!r} is not served here; {self.model!r} is."
            raise ApiError(404, message, param="model", code="model_not_found")

    def _text_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, "This model has no tokenizer; send completions with token ids.", param=param)
        return self.tokenizer

    async def _generate(
        self, request: Request, body: GenerationRequest, prompts: Sequence[list[int]], max_tokens: int,
        kind: type[Format],
    ) -> Response:  # fmt: skip
        for prompt in prompts:
            if not 0 < len(prompt) < self.context:
                message = f"The prompt has {len(prompt):,} tokens; give 1 to {self.context - 1:,}."
                raise ApiError(400, message, param="prompt", code="context_length_exceeded" if prompt else None)
        with explained():
            # An answer ends with the context in any case, so asking for more is not an error.
            sampling = body.sampling(min(max_tokens, self.context))
        if sampling.stop and self.tokenizer is None:
            raise ApiError(400, "This model has no tokenizer; use stop_token_ids.", param="stop")
        salt = salt_of(request.state.tenant, body.cache_salt, body.user)
        with explained():
            ticket = await self.worker.submit(prompts, sampling, salt)
        generation = Generation(self.worker, self.metrics, ticket, self.tokenizer, request)
        format = kind(
            self.model, self.tokenizer, logprobs=sampling.logprobs is not None, token_ids=bool(body.return_token_ids)
        )
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await respond(generation, format, bool(body.stream), usage)

    def models(self) -> JsonObject:
        """GET /v1/models."""
        return {"object": "list", "data": [self.one_model(self.model)]}

    def one_model(self, name: str) -> JsonObject:
        """GET /v1/models/NAME."""
        if name != self.model:
            raise ApiError(404, f"The model {name[:80]!r} is not served here.", param="model", code="model_not_found")
        model = {"id": self.model, "object": "model", "created": self.started_s, "owned_by": "tonnage"}
        return model | {"max_model_len": self.context}

    def health(self) -> Response:
        """GET /health, GET or POST /ping: whether requests are accepted."""
        if self.worker.broken:
            return JSONResponse({"status": "broken", "reason": self.worker.broken}, 503)
        if self.worker.draining:
            return JSONResponse({"status": "draining"}, 503, {"Retry-After": "5"})
        return JSONResponse({"status": "ok"})

    async def ledger(self) -> JsonObject:
        """GET /ledger: the bytes of the KV cache and the card."""
        state, card = await self.state(), self.worker.engine.card
        figures = {"kv": kv_figures(state.ledger), "card": card_figures(card) if card is not None else None}
        return figures | {"running": state.running, "waiting": state.waiting}

    async def scrape(self) -> Response:
        """GET /metrics."""
        return PlainTextResponse(self.metrics.text(await self.state()), media_type="text/plain; version=0.0.4")


def create_app(service: Service, keys: Sequence[str] = ()) -> FastAPI:
    """Create the application; the engine's thread lives as long as it does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.worker.stop()

    app = FastAPI(
        title="tonnage", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.add_middleware(AccessMiddleware, keys=Keys(keys))
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, _failed)
    app.add_api_route("/v1/completions", service.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", service.models, response_model=None)
    app.add_api_route("/v1/models/{name:path}", service.one_model, response_model=None)
    app.add_api_route("/health", service.health, response_model=None)
    app.add_api_route("/ping", service.health, methods=["GET", "POST"], response_model=None)
    app.add_api_route("/ledger", service.ledger, response_model=None)
    app.add_api_route("/version", lambda: {"version": __version__}, response_model=None)
    app.add_api_route("/metrics", service.scrape, response_model=None)
    return app


async def _failed(request: Request, error: Exception) -> Response:
    """Return any failure as an error in OpenAI's format."""
    if isinstance(error, HTTPException):
        words: Any = {404: "There is no such route.", 405: "This route does not take that method."}
        error = ApiError(error.status_code, words.get(error.status_code, error.detail), headers=error.headers)
    elif not isinstance(error, ApiError):
        _log.error("A request failed", exc_info=error)
        error = ApiError(500, "The server failed on this request.", kind="server_error")
    return error.response()
