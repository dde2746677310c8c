"""One request: collected step by step, returned whole or streamed, aborted as soon as the client disconnects."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tonnage.errors import RequestError
from tonnage.serve.sampling import AnswerDelta
from tonnage.serve.scheduler.queue import QueueFull
from tonnage.serve.server.answers import DONE, Format, JsonObject, error_event, usage_of
from tonnage.serve.server.limits import ApiError, unavailable
from tonnage.serve.server.metrics import Metrics
from tonnage.serve.server.worker import EngineRequest, Gone, Unavailable, Worker
from tonnage.serve.text import Answer, Tokenizer

# Retry-After while the server stops.
_STOPPING_S = 5


@contextmanager
def explained() -> Iterator[None]:
    """Turn engine errors into API errors."""
    try:
        yield
    except QueueFull as error:
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        words = error.words.replace("\n", " ")
        raise ApiError(429, words, kind="rate_limit_error", code="queue_full", headers=headers) from None
    except Unavailable as error:
        raise unavailable(str(error), retry_after_s=_STOPPING_S) from None
    except RequestError as error:
        raise ApiError(400, error.words.replace("\n", " ")) from None


class Generation:
    """The answers of one submitted request as they grow; closed as soon as the client disconnects."""

    def __init__(
        self, worker: Worker, metrics: Metrics, ticket: EngineRequest, tokenizer: Tokenizer | None, request: Request
    ) -> None:
        self._worker, self._metrics, self._ticket = worker, metrics, ticket
        self._unfinished = "abort"
        sampling = ticket.sampling
        numbered = enumerate(prompt for prompt in ticket.prompts for _ in range(sampling.n))
        self.answers = [Answer(index, prompt, sampling, tokenizer) for index, prompt in numbered]
        self._watch = asyncio.create_task(self._until_gone(request))

    async def _until_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._worker.close(self._ticket)

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    @property
    def usage(self) -> JsonObject:
        """Token counts."""
        return usage_of(self._ticket.prompts, self.answers, self._ticket.cached_tokens)

    async def next(self) -> list[tuple[Answer, AnswerDelta]]:
        """Wait for and return what is new."""
        found: list[tuple[Answer, AnswerDelta]] = []
        while not found and not self.finished:
            try:
                deliveries = await self._ticket.deliveries()
            except Gone:
                if self._worker.draining:
                    raise unavailable("The server is stopping.", retry_after_s=_STOPPING_S) from None
                raise
            for delta in deliveries:
                answer, reason = self.answers[delta.index], delta.finish_reason
                if answer.finished:
                    continue
                if reason in ("error", "abort"):
                    self._unfinished = reason
                    if reason == "abort":
                        raise unavailable("The server gave this request up.")
                    raise unavailable("The step that computed this request failed; ask again.", code="step_failed")
                self._metrics.delivered(self._ticket, delta)
                piece = answer.take(delta)
                if piece is None:
                    continue
                found.append((answer, piece))
                if piece.finish_reason is not None:
                    self._metrics.finished(piece.finish_reason, delta.time_s - self._ticket.arrival_s)
                    if reason is None:
                        self._worker.end(self._ticket, delta.index)
        return found

    def close(self) -> None:
        """Remove the request from the engine, finished or not."""
        for answer in self.answers:
            if not answer.finished:
                self._metrics.finished(self._unfinished, None)
        self._worker.close(self._ticket)
        self._watch.cancel()


async def respond(generation: Generation, format: Format, stream: bool, usage: bool) -> Response:
    """Return the response; a stream starts with its first token, so that earlier failures have their own status."""
    try:
        if stream:
            return EventStream(generation, format, await generation.next(), usage)
        while not generation.finished:
            await generation.next()
    except Gone:
        generation.close()
        return Response(status_code=499)
    except BaseException:
        generation.close()
        raise
    generation.close()
    return JSONResponse(format.complete(generation.answers, generation.usage))


class EventStream(Response):
    """Server-sent events; everything from one step goes out in one write."""

    def __init__(
        self, generation: Generation, format: Format, first: list[tuple[Answer, AnswerDelta]], usage: bool
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._generation, self._format, self._first, self._usage = generation, format, first, usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or the client disconnects."""
        generation, format, pieces = self._generation, self._format, self._first

        async def write(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                opening = format.opening(generation.answers)
                await write(opening + b"".join(format.chunk(answer, piece) for answer, piece in pieces))
                while not generation.finished:
                    pieces = await generation.next()
                    await write(b"".join(format.chunk(answer, piece) for answer, piece in pieces))
                last = format.usage_chunk(generation.usage) if self._usage else b""
            except ApiError as error:
                last = error_event(error.body)
            await write(last + DONE, more=False)
        except Gone:
            pass
        finally:
            generation.close()
