"""The tools for an assistant: their parameters, and the Tonnage command line behind each.

    tool       reads     runs code   command
    plan       names         –       plan train, plan serve, plan rl
    show       a file        –       show
    explain    a file        –       explain --no-run
    diff       two files     –       diff
    gpus       names         –       gpu
    help       –             –       COMMAND --help
    run        a script     asks     run
    certify    a script     asks     certify

A tool's docstring is its description, and its annotations are its schema. A new command needs a function, a line in `all_tools`,
and its figures in `data/answers.toml`.
"""

import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from inspect import getdoc
from typing import Annotated, Any, Literal, TypeAlias

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resolve import Elicit, ElicitationResult, Resolve
from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult, ToolAnnotations
from pydantic import BaseModel, Field

from tonnage.assistant.session import AssistantSession, is_text
from tonnage.errors import RequestError
from tonnage.models.diffusion import find_pipeline

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_WRITES = ("--json", "--html", "--open", "--export", "--force")
_RUN_LIMIT_S = 600
_READS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
# With `online`, a plan looks its model up on the hub.
_LOOKS_UP = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=True)
# A script does whatever its author wrote.
_RUNS = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True)

Cards = Annotated[str, Field(description="A card, like rtx-4090 or h200, or a cluster, like 8xh100")]
File = Annotated[
    str, Field(description="A recording (.tonnage), by name one of this session, or a snapshot of PyTorch")
]
Words = Annotated[list[str] | str, Field(description="The script's own arguments, as on the command line")]
Flags = Annotated[
    list[str] | str,
    Field(description='More flags, like ["--seq", "8k", "--lora", "16"]; the tool `help` lists them'),
]
Rank = Annotated[int | None, Field(ge=0, description="Of a cluster's recording: this rank, not the worst")]
Seconds = Annotated[int, Field(ge=1, le=86_400, description="Stop after so long, and say what was seen until then")]
Commands = Literal["run", "plan train", "plan serve", "plan rl", "plan train of images", "plan serve of images"]
AnyContext: TypeAlias = Context[AssistantSession]


class Consent(BaseModel):
    """What the person says to the question before a script is run."""

    run: bool = Field(default=True, title="Run it", description="Run this script now, on this machine")


def all_tools() -> list[Tool]:
    """Return the tools whose commands are installed."""
    table: list[tuple[str, Callable[..., Any], str, ToolAnnotations]] = [
        ("plan", plan, "Plan training, serving or RL", _LOOKS_UP),
        ("show", show, "Where the memory went", _READS),
        ("explain", explain, "Why it ran out of memory", _READS),
        ("diff", diff, "What grew between two runs", _READS),
        ("gpus", gpus, "Look up cards", _READS),
        ("help", flags_of, "Flags of a command", _READS),
        ("run", run, "Run a script on a virtual GPU", _RUNS),
    ]
    if find_spec("tonnage.commands.certify"):
        table.append(("certify", certify, "Will the whole training survive?", _RUNS))
    tools = [Tool.from_function(made, name, title, getdoc(made), None, hints) for name, made, title, hints in table]
    for tool in tools:
        tool.parameters["additionalProperties"] = False
    return tools


async def plan(
    ctx: AnyContext,
    what: Annotated[Literal["train", "serve", "rl"], Field(description="What is planned")],
    model: Annotated[str, Field(description="A preset, like llama-3.1-8b or flux-dev, a config.json or a checkpoint")],
    gpus: Annotated[str, Field(description="Cards, like h200 or 8xh100; empty: say which cards hold it")] = "",
    flags: Flags = "",
    online: Annotated[bool, Field(description="Look a model that is no preset up on the Hugging Face hub")] = False,
) -> CallToolResult:
    """What training, serving or RL of a model takes on these GPUs, and the fastest configuration that fits.

    Nothing is run and no GPU is needed. Models that make images or videos are planned with train and serve too.
    """
    words = _split(flags)
    written = next((word for word in words if word.partition("=")[0] in _WRITES), None)
    if written:
        hint = f"Leave it out; a person can run: tonnage plan {what} {model} {written}"
        raise RequestError(f"{written} writes files, and this tool does not.", hint=hint)
    if not model.strip() or model.startswith("-"):
        raise RequestError(f"{model!r} is no model.", hint="Name a preset, like llama-3.1-8b, or a config.json.")
    session = _session(ctx)
    session.folder.check([model, gpus, *words])
    words += ["--online"] * online + [f"--gpus={gpus}"] * bool(gpus)
    page = bool(gpus) and find_pipeline(model) is None
    return await session.answer(ctx, "plan", ["plan", what, model, *words], page=page)


async def show(ctx: AnyContext, file: File, rank: Rank = None) -> CallToolResult:
    """Where the memory of a recorded run went: categories, phases, the largest tensors and their source lines."""
    session = _session(ctx)
    return await session.answer(ctx, "show", ["show", *_rank(rank)], files=[session.folder.file(file)])


async def explain(
    ctx: AnyContext,
    file: Annotated[str, Field(description="A recording, a memory snapshot of PyTorch or a log; or else text")] = "",
    text: Annotated[str, Field(description="An out-of-memory message or a log, pasted as it is")] = "",
    rank: Rank = None,
) -> CallToolResult:
    """Why a run ran out of memory: the cause, the evidence in bytes, and fixes ranked by what they save."""
    if bool(file.strip()) == bool(text.strip()):
        raise RequestError("Either a file or a text is explained.", hint="Give one of the two: file or text.")
    session = _session(ctx)
    path = session.folder.pasted(text) if text.strip() else session.folder.file(file)
    # Without --no-run, the recording's script would be run again with changes.
    words = ["explain", "--no-run", *_rank(rank)]
    return await session.answer(ctx, "explain", words, files=[path], page=not is_text(path))


async def diff(
    ctx: AnyContext,
    before: File,
    after: File,
    fail_above: Annotated[str, Field(description="How much a peak may grow, like 5% or 512MiB")] = "",
) -> CallToolResult:
    """What grew from one recorded run to another: by category, module and source line."""
    session = _session(ctx)
    files = [session.folder.file(before), session.folder.file(after)]
    return await session.answer(ctx, "diff", ["diff", *[f"--fail-above={fail_above}"] * bool(fail_above)], files=files)


async def gpus(
    ctx: AnyContext,
    names: Annotated[str, Field(description="Like h100, or rtx-4090,l40s; empty: all, by name and memory")] = "",
) -> CallToolResult:
    """Which cards are known, and what they have."""
    from tonnage.hardware import all_gpus

    session, wanted = _session(ctx), [name for name in re.split(r"[,\s]+", names) if name]
    if not wanted:
        memory = {gpu.key: round(gpu.memory_bytes / 2**30, 1) for gpu in all_gpus()}
        return session.result(f"{len(memory)} cards are known.", {"memory_gib": memory})
    session.folder.check(wanted)
    return await session.answer(ctx, "gpu", ["gpu"], files=wanted, page=False)


async def flags_of(ctx: AnyContext, command: Annotated[Commands, Field(description="Which one")]) -> CallToolResult:
    """The flags of a command, as its --help prints them."""
    verb, of_images, _ = command.partition(" of images")
    return await _session(ctx).printed([*verb.split(), *["flux-dev"] * bool(of_images), "--help"])


def _may(verb: str) -> Resolve:
    """Build the confirmation before a run; it is skipped with `allow_run`, and None if the client cannot ask."""

    def ask(ctx: AnyContext, gpu: str, script: str, arguments: list[str] | str) -> Consent | Elicit[Consent] | None:
        session, words = _session(ctx), _split(arguments)
        if script in _LAUNCHERS:
            session.folder.check(words)
        elif not session.folder.file(script).is_file():
            hint = f"Name a script below {session.folder.root}, or {', '.join(_LAUNCHERS)} with its words as arguments."
            raise RequestError(f"There is no script {script!r}.", hint=hint)
        if session.allow_run:
            return Consent()
        able = ctx.client_capabilities.elicitation if ctx.client_capabilities else None
        if able is None or (able.form is None and able.url is not None):
            return None
        command = shlex.join(["tonnage", verb, *_card(gpu), script, *words])
        return Elicit(f"Run this in {session.folder.root}? The script is executed as it is.\n\n{command}", Consent)

    return Resolve(ask)


async def run(
    ctx: AnyContext,
    consent: Annotated[ElicitationResult[Consent], _may("run")],
    gpu: Cards,
    script: Annotated[str, Field(description="A script or notebook; or torchrun, accelerate or deepspeed")],
    arguments: Words = "",
    timeout_s: Seconds = _RUN_LIMIT_S,
) -> CallToolResult:
    """Run an unmodified script on a GPU that is not there: does it fit, where is its peak, what would help?

    Its code is executed on this machine's CPU, without the arithmetic on tensors, so a person is asked first. The recording
    that it leaves can be given to show, explain and diff by its name.
    """
    _check(consent, "run")
    program = [script, *_split(arguments)]
    words = ["run", *_card(gpu)]
    return await _session(ctx).answer(ctx, "run", words, program=program, records=True, limit_s=timeout_s)


async def certify(
    ctx: AnyContext,
    consent: Annotated[ElicitationResult[Consent], _may("certify")],
    gpu: Cards,
    script: Annotated[str, Field(description="A script that trains")],
    arguments: Words = "",
    epochs: Annotated[int | None, Field(ge=1, description="How many; none: as many as the script says")] = None,
    timeout_s: Seconds = _RUN_LIMIT_S,
) -> CallToolResult:
    """Will the whole training survive on this card, to its last batch? The real data loader is walked through.

    The script is executed, so a person is asked first.
    """
    _check(consent, "certify")
    program = [script, *_split(arguments)]
    words = ["certify", f"--gpu={gpu}", *[f"--epochs={epochs}"] * (epochs is not None)]
    return await _session(ctx).answer(ctx, "certify", words, program=program, page=False, limit_s=timeout_s)


def _check(consent: ElicitationResult[Consent], verb: str) -> None:
    """Raise unless a person agreed."""
    agreed: Any = getattr(consent, "data", False)  # None if there was no way to ask
    if agreed is None:
        raise RequestError(
            f"{verb} executes a script, and this client cannot ask a person whether it may.",
            hint="Start the server with --allow-run to run scripts without asking, or run the command in a terminal.",
        )
    if not agreed or not agreed.run:
        raise RequestError("The person did not agree to it: nothing was run.", hint="Ask what they would rather do.")


def _session(ctx: AnyContext) -> AssistantSession:
    session: AssistantSession = ctx.request_context.lifespan_context
    return session


def _split(words: list[str] | str) -> list[str]:
    """Split arguments given as one shell line; a list stays as it is."""
    try:
        return shlex.split(words) if isinstance(words, str) else list(words)
    except ValueError as error:
        raise RequestError(f"{words!r} cannot be taken apart: {error}.", hint="Close its quotes.") from None


def _card(name: str) -> list[str]:
    return [f"--gpus={name}" if re.match(r"\d+x", name) else f"--gpu={name}"]


def _rank(rank: int | None) -> list[str]:
    return [] if rank is None else [f"--rank={rank}"]
