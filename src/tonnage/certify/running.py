"""Run a training on a virtual GPU without a limit, and return the program of its memory events."""

from collections.abc import Callable
from dataclasses import dataclass

from tonnage.certify.memo import Memo
from tonnage.certify.program import RecordedProgram, Unfaithful
from tonnage.hardware import Gpu
from tonnage.recording.records import Dependence
from tonnage.recording.writes import ScriptWrites
from tonnage.script.running import Ending, Program, run_as_main
from tonnage.virtual.builds import new_session
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.going_on import Stopped
from tonnage.virtual.imports import quick_imports
from tonnage.virtual.redirect import Redirection


@dataclass
class TrainingResult:
    """The result of a script on a card without a limit."""

    program: RecordedProgram
    ending: Ending
    steps: int
    replayed_parts: int
    dependence: Dependence | None  # what the script depended on, where its ending says so
    is_faithful: bool  # whether replayed steps requested what the run ones did
    notes: list[str]
    torch: str
    torch_version: tuple[int, int]
    writes: ScriptWrites | None = None


def run_training(
    script: Program, arguments: list[str], *, gpu: Gpu, torch_version: str | None = None, epochs: int = 0, steps: int = 0,
    replays: bool = True, progress: Callable[[Memo], None] | None = None, redirection: Redirection | None = None,
) -> TrainingResult:  # fmt: skip
    """Run the script to its end, or for some epochs or steps."""
    redirection = redirection or Redirection()
    session, program = new_session(gpu, torch_version), RecordedProgram()
    memo = Memo(session, program, replays=replays, most_epochs=epochs, most_steps=steps)
    session.open()
    session.device.lift_limit()
    from tonnage.virtual.cluster.rank import install_alone

    patches = Patches()
    install_alone(session, patches)
    if progress is not None:
        memo.on_step = lambda: progress(memo)
    memo.install(patches)
    try:
        with redirection:
            ending = run_as_main(
                script, arguments, session.torch, quick_imports(), (Stopped, Unfaithful), session.stand_ins.explain
            )
    finally:
        patches.undo()
        session.close()
    if ending.error.startswith(Stopped.__name__):
        ending = Ending("ok")
    # Where replayed steps always lack blocks that run steps have, the script works on gradients itself.
    run, replayed = memo.own_blocks[True], memo.own_blocks[False]
    is_faithful = len(run) < 2 or len(replayed) < 2 or min(run) <= max(replayed)
    return TrainingResult(
        program=program,
        ending=ending,
        steps=memo.step,
        replayed_parts=memo.replayed_parts,
        dependence=session.stand_ins.dependence,
        is_faithful=is_faithful,
        notes=sorted(memo.notes),
        torch=session.modelled,
        torch_version=session.device.torch_version,
        writes=redirection.writes,
    )
