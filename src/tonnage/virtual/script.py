"""Runs a script on a virtual GPU and returns the recording."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tonnage.hardware import Gpu
from tonnage.recording import Recording
from tonnage.recording.beyond import TO_ITS_END, parted
from tonnage.script.program import Program
from tonnage.script.running import Ending, run_as_main
from tonnage.virtual.builds import new_session
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.going_on import GoingOn, Stopped
from tonnage.virtual.imports import quick_imports
from tonnage.virtual.session import Session


def run_script(
    script: Program | Path,
    arguments: list[str],
    *,
    gpu: Gpu,
    torch_version: str | None = None,
    progress: Any = None,
    unlimited: bool = False,
) -> Recording:
    """Run the script to its end, however it ends, and return the recording.

    A run that exceeds the card continues without a limit; if `unlimited`, there is none from the start.
    """
    program = script if isinstance(script, Program) else Program.of_file(script)
    session = new_session(gpu, torch_version)
    session.open(capture=True)
    device = session.device

    def tell() -> None:
        who, peak = device.attribution, device.memory_stats()["allocated_bytes.all.peak"]
        progress.update(step=who.step, phase=who.phase, module=who.module_of(-1), peak_bytes=peak)

    device.on_progress = tell if progress is not None else None
    from tonnage.virtual.cluster import alone  # imports torch, so not before the session is open

    if unlimited:
        device.lift_limit()
    else:
        device.going_on = GoingOn(device, session.torch.OutOfMemoryError)
    patches = Patches()
    alone.install(session, patches)
    try:
        ending = run_as_main(program, arguments, session.torch, quick_imports(), told_elsewhere=(Stopped,))
    finally:
        patches.undo()
        session.close()
    return recorded(session, ending, program, arguments)


def recorded(session: Session, ending: Ending, program: Program, arguments: Sequence[str]) -> Recording:
    """Return the recording of a script, with how it ended."""
    going_on, ooms, header = (
        session.device.going_on,
        session.device.ooms,
        {**program.header, "arguments": tuple(arguments)},
    )
    if going_on is not None and going_on.since is not None:
        # It continued after the failed request: record the part up to it, and the whole.
        failed = bool(ending.error) and not going_on.stopped_by
        whole = session.recording(outcome="error" if failed else "ok", **header, ooms_caught=going_on.at_oom - 1)
        ended = going_on.stopped_by or (ending.error.partition("\n")[0] if failed else TO_ITS_END)
        return parted(whole, ooms[going_on.at_oom - 1], going_on.since, ended)
    recording = session.recording(
        outcome=ending.outcome, **header, exit_status=ending.exit_status, error=ending.error,
        ooms_caught=len(ooms) - (ending.outcome == "oom"),
    )  # fmt: skip
    if ending.outcome == "oom" and ooms:
        recording.oom = ooms[-1]
    return recording
