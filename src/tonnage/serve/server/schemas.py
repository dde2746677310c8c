"""Request bodies after OpenAI's schema, and their translation. No field holds a URL that would be fetched.

Unknown fields are refused, as are known ones without support, unless their value has no effect anyway.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tonnage.serve.sampling import MOST_STOPS, Sampling
from tonnage.serve.server.limits import MOST_CHOICES, MOST_MESSAGES, MOST_PROMPT_TOKENS, MOST_PROMPTS, ApiError

_Model = TypeVar("_Model", bound=BaseModel)

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, max_length=MOST_PROMPT_TOKENS)]
Word = Annotated[str, Field(max_length=1024)]


def parse(kind: type[_Model], body: bytes) -> _Model:
    """Parse a body; an ApiError names the first wrong field, without its value, which may be long or no text."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        raise ApiError(400, f"The body is not JSON: {found[0]['msg']}.")
    field = str(found[0]["loc"][0]) if found[0]["loc"] else None
    same = [each["msg"] for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    words = "; or ".join(dict.fromkeys(same))[:500]
    raise ApiError(400, f"{field[:80]}: {words}." if field else f"{words}.", param=field and field[:80])


class Neutral:
    """Marks a field that is known but not supported: refused unless left out, or one of these values."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class StreamOptions(BaseModel):
    """What a stream sends besides its text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(BaseModel):
    """Fields common to completions and chat completions."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Word | None = None

    # Beyond OpenAI's schema, under the names that other servers use.
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
    cache_salt: Word | None = None
    return_token_ids: bool | None = None

    frequency_penalty: Annotated[Any, Neutral(0)] = None
    presence_penalty: Annotated[Any, Neutral(0)] = None
    repetition_penalty: Annotated[Any, Neutral(1)] = None
    logit_bias: Annotated[Any, Neutral({})] = None

    # Bookkeeping of OpenAI's service, without effect on the answer.
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="after")
    def _served(self) -> Self:
        for name, field in type(self).model_fields.items():
            neutral = next((mark for mark in field.metadata if isinstance(mark, Neutral)), None)
            if neutral and getattr(self, name) not in (None, *neutral.values):
                raise ApiError(400, f"{name} is not served; leave it out.", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream.", param="stream_options")
        return self

    @property
    def answers_per_prompt(self) -> int:
        """Answers per prompt."""
        return 1 if self.n is None else self.n

    @property
    def alternatives(self) -> int | None:
        """Number of top log probabilities per token; None for no log probabilities."""
        raise NotImplementedError

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the engine's sampling parameters; raises RequestError beyond the engine's limits."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k is None or self.top_k == -1 else self.top_k,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            n=self.answers_per_prompt,
            stop=stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.alternatives,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: one or several texts or lists of token ids."""

    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: int | None = None
    best_of: int | None = None
    echo: Annotated[Any, Neutral(False)] = None
    suffix: Annotated[Any, Neutral("")] = None

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.best_of not in (None, self.answers_per_prompt):
            raise ApiError(400, "best_of is not served beyond n; leave it out.", param="best_of")
        if len(self.prompts) * self.answers_per_prompt > MOST_CHOICES:
            raise ApiError(400, f"More than {MOST_CHOICES} answers in one request.", param="n")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def alternatives(self) -> int | None:
        """The requested number."""
        return self.logprobs


class ContentPart(BaseModel):
    """A part of a message; only text is supported."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Word
    text: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type != "text" or self.text is None:
            raise ApiError(400, f"Content of type {self.type!r} is not served; send text.", param="messages")
        return self


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None = None
    name: Word | None = None
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None

    # Clients send answers back as they received them; no model reads these fields.
    annotations: Any = None
    reasoning_content: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""

    @property
    def words(self) -> dict[str, str]:
        """The message for chat templates, where the developer role is the system."""
        words = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        return words if self.name is None else words | {"name": self.name}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: Any = None

    tools: Annotated[Any, Neutral([])] = None
    tool_choice: Annotated[Any, Neutral("none", "auto")] = None
    functions: Annotated[Any, Neutral([])] = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
    response_format: Annotated[Any, Neutral({"type": "text"})] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    audio: Annotated[Any, Neutral()] = None
    prediction: Annotated[Any, Neutral()] = None
    web_search_options: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs.", param="top_logprobs")
        return self

    @property
    def alternatives(self) -> int | None:
        """The requested number; the sampled token is always reported besides."""
        return (self.top_logprobs or 0) if self.logprobs else None
