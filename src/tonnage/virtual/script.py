"""Runs a script, or the body of a `with tonnage.virtual_gpu("h200") as gpu:`, on a virtual GPU."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tonnage.hardware import Gpu, find_cuda_gpu
from tonnage.ledger import Ledger
from tonnage.recording import Recording
from tonnage.recording.beyond import TO_ITS_END, parted
from tonnage.recording.writes import IN_PYTHON, writes_sentence
from tonnage.results import pause_for_results
from tonnage.script.running import Ending, Program, run_as_main
from tonnage.virtual.builds import new_session
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.going_on import GoingOn, Stopped
from tonnage.virtual.imports import quick_imports
from tonnage.virtual.redirect import Redirection
from tonnage.virtual.session import Session


def run_script(
    script: Program | Path,
    arguments: list[str],
    *,
    gpu: Gpu,
    torch_version: str | None = None,
    progress: Any = None,
    unlimited: bool = False,
    timed: bool = True,
    redirection: Redirection | None = None,
) -> Recording:
    """Run the script to its end, however it ends, and return the recording.

    A run that exceeds the card continues without a limit; if `unlimited`, there is none from the start. Unless `timed`, no step
    is captured for the clock. What the script writes is discarded, unless the `redirection` says otherwise.
    """
    program = script if isinstance(script, Program) else Program.of_file(script)
    redirection = redirection or Redirection()
    session = new_session(gpu, torch_version)
    session.open(capture=timed)
    device = session.device

    def tell() -> None:
        who, peak = device.attribution, device.memory_stats()["allocated_bytes.all.peak"]
        progress.update(step=who.step, phase=who.phase, module=who.module_of(-1), peak_bytes=peak)

    device.on_progress = tell if progress is not None else None
    from tonnage.virtual.cluster.rank import install_alone

    if unlimited:
        device.lift_limit()
    else:
        device.going_on = GoingOn(device, session.torch.OutOfMemoryError)
    patches = Patches()
    install_alone(session, patches)
    try:
        with redirection:
            ending = run_as_main(
                program, arguments, session.torch, quick_imports(), (Stopped,), session.stand_ins.explain
            )
    finally:
        patches.undo()
        session.close()
    recording = recorded(session, ending, program, arguments)
    recording.writes = redirection.writes
    return recording


def recorded(session: Session, ending: Ending, program: Program, arguments: Sequence[str]) -> Recording:
    """Return the recording of a script, with how it ended."""
    going_on, ooms = session.device.going_on, session.device.ooms
    header = {**program.header, "arguments": tuple(arguments)}
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
    if ending.outcome == "depends":
        recording.dependence = session.stand_ins.dependence
    if ending.outcome == "oom" and ooms:
        recording.oom = ooms[-1]
    return recording


class VirtualGpu:
    """A card that is available inside the `with` block, and statistics of its memory.

    What is written inside the block is discarded, moved to the folder `keep`, or written in place if `write`.
    """

    def __init__(
        self, gpu: str | Gpu, *, torch: str | None = None, keep: str | Path | None = None, write: bool = False
    ) -> None:
        self.gpu = find_cuda_gpu(gpu) if isinstance(gpu, str) else gpu
        self._torch = torch
        self._session: Session | None = None
        self._end_results: Callable[[], None] = lambda: None
        self._redirection = Redirection(keep=None if keep is None else Path(keep), in_place=write)

    def __enter__(self) -> "VirtualGpu":
        self._session = new_session(self.gpu, self._torch)
        self._session.open()
        self._redirection.begin()
        if self._redirection.is_active:
            self._end_results = pause_for_results(self._redirection.pause)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._session
        self._end_results()
        self._redirection.end()
        if error is not None and (dependence := self._session.stand_ins.told_of(error)):
            error.add_note(dependence)
        self._session.close()
        if self._redirection.writes and self._redirection.writes.files:
            sys.stderr.write(f"tonnage: {writes_sentence(self._redirection.writes, IN_PYTHON)}\n")

    @property
    def _entered(self) -> Session:
        if self._session is None:
            raise RuntimeError("Enter the virtual GPU first: with tonnage.virtual_gpu(...) as gpu: ...")
        return self._session

    @property
    def recording(self) -> Recording:
        """Everything recorded so far; each access gives an up-to-date recording."""
        self._entered.device.attribution.finish()
        return self._entered.recording()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that tensors hold now."""
        return self._entered.device.memory_stats()["allocated_bytes.all.current"]

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes that tensors held at once."""
        return self._entered.device.memory_stats()["allocated_bytes.all.peak"]

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the allocator reserved."""
        return self._entered.device.memory_stats()["reserved_bytes.all.peak"]

    def ledger(self) -> Ledger:
        """Return the bytes by category at the peak."""
        return self.recording.ledger()


def virtual_gpu(
    gpu: str | Gpu, *, torch: str | None = None, keep: str | Path | None = None, write: bool = False
) -> VirtualGpu:
    """Return a context manager in which `cuda` is the named card; `torch` is the version whose kernels are modelled.

    Files that are written inside it are discarded at its end: `keep` names a folder to move them to, and with `write`
    they are written in place.
    """
    return VirtualGpu(gpu, torch=torch, keep=keep, write=write)
