"""One request in progress: submitted, collected step by step, returned whole or streamed, aborted on disconnect.

A disconnect is noticed whether the client streams or not, and whether or not there are tokens to send.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tonnage.errors import RequestError
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.queue import QueueFull
from tonnage.serve.server.answers import DONE, Answer, AnswerDelta, Format, JsonObject, error_event, usage_of
from tonnage.serve.server.errors import ApiError, queue_full, unavailable
from tonnage.serve.server.metrics import Metrics
from tonnage.serve.server.worker import Delivery, EngineRequest, Gone, Unavailable, Worker
from tonnage.serve.text import Tokenizer

# Retry-After while the server stops.
_STOPPING_S = 5


@contextmanager
def explained() -> Iterator[None]:
    """Turn engine errors into API errors."""
    try:
        yield
    except QueueFull as error:
        raise queue_full(error.words.replace("\n", " "), error.retry_after_s) from None
    except Unavailable as error:
        raise unavailable(str(error), retry_after_s=_STOPPING_S) from None
    except RequestError as error:
        raise ApiError(400, error.words.replace("\n", " ")) from None


class Generation:
    """The answers of one request as they grow."""

    def __init__(self, worker: Worker, metrics: Metrics, ticket: EngineRequest, tokenizer: Tokenizer | None) -> None:
        self._worker, self._metrics, self._ticket = worker, metrics, ticket
        self._unfinished = "abort"
        sampling = ticket.sampling
        numbered = enumerate(prompt for prompt in ticket.prompts for _ in range(sampling.n))
        self.answers = [Answer(index, prompt, sampling, tokenizer) for index, prompt in numbered]

    @classmethod
    async def begin(
        cls,
        worker: Worker,
        metrics: Metrics,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        salt: str,
        tokenizer: Tokenizer | None,
    ) -> "Generation":
        """Submit a request to the engine; raises an ApiError if it is refused."""
        with explained():
            ticket = await worker.submit(prompts, sampling, salt)
        return cls(worker, metrics, ticket, tokenizer)

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
            found = list(self._pieces(deliveries))
        return found

    def _pieces(self, deliveries: Sequence[Delivery]) -> Iterator[tuple[Answer, AnswerDelta]]:
        for delivery in deliveries:
            answer = self.answers[delivery.index]
            if answer.finished:
                continue
            if delivery.finish_reason in ("error", "abort"):
                self._unfinished = delivery.finish_reason
                if self._unfinished == "abort":
                    raise unavailable("The server gave this request up.")
                raise unavailable("The step that computed this request failed; ask again.", code="step_failed")
            self._metrics.delivered(self._ticket, delivery)
            piece = answer.take(delivery)
            if piece is None:
                continue
            if piece.finish_reason is not None:
                self._metrics.finished(piece.finish_reason, delivery.time_s - self._ticket.arrival_s)
            if piece.finish_reason is not None and delivery.finish_reason is None:
                self._worker.end(self._ticket, delivery.index)
            yield answer, piece

    def close(self) -> None:
        """Remove the request from the engine, finished or not."""
        for answer in self.answers:
            if not answer.finished:
                self._metrics.finished(self._unfinished, None)
        self._worker.close(self._ticket)

    def watch(self, request: Request) -> "asyncio.Task[None]":
        """Abort the request as soon as the client disconnects."""
        return asyncio.create_task(self._until_gone(request))

    async def _until_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._worker.close(self._ticket)


async def respond(request: Request, generation: Generation, format: Format, stream: bool, usage: bool) -> Response:
    """Return the response; a stream starts with its first token, so that earlier failures have their own status."""
    watch = generation.watch(request)
    try:
        if stream:
            first = await generation.next()
            return EventStream(generation, format, watch, first, usage)
        while not generation.finished:
            await generation.next()
    except Gone:
        _end(generation, watch)
        return Response(status_code=499)
    except BaseException:
        _end(generation, watch)
        raise
    _end(generation, watch)
    return JSONResponse(format.complete(generation.answers, generation.usage))


def _end(generation: Generation, watch: "asyncio.Task[None]") -> None:
    generation.close()
    watch.cancel()


class EventStream(Response):
    """Server-sent events; everything from one step goes out in one write."""

    def __init__(
        self,
        generation: Generation,
        format: Format,
        watch: "asyncio.Task[None]",
        first: list[tuple[Answer, AnswerDelta]],
        usage: bool,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._generation, self._format, self._watch = generation, format, watch
        self._first, self._usage = first, usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or the client disconnects."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_all(send)
        except Gone:
            pass
        finally:
            _end(self._generation, self._watch)

    async def _send_all(self, send: Send) -> None:
        async def write(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            await write(self._format.opening(self._generation.answers) + self._events(self._first))
            while not self._generation.finished:
                await write(self._events(await self._generation.next()))
        except ApiError as error:
            await write(error_event(error.body) + DONE, more=False)
            return
        usage = self._format.usage_chunk(self._generation.usage) if self._usage else b""
        await write(usage + DONE, more=False)

    def _events(self, pieces: list[tuple[Answer, AnswerDelta]]) -> bytes:
        return b"".join(self._format.chunk(answer, piece) for answer, piece in pieces)
