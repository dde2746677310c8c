"""A plan: techniques with their settings, and their predicted needs, stored as JSON; and the techniques of a solution."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tonnage.errors import OutputExists, RequestError
from tonnage.fit.choose.choosing import PIECE_BYTES
from tonnage.fit.choose.placement import HOST_GRADIENTS, STEP_IN_BACKWARD, WINDOW_BYTES
from tonnage.fit.choose.solver import Solution
from tonnage.fit.survey.survey import BLOCK, BLOCK_OFFLOAD, KEEP, OFFLOAD, Survey, recompute_mode
from tonnage.fit.technique import Technique, make
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.results import results_in_place
from tonnage.untrusted import Unreadable, parse_json, read_bytes

_VERSION = 1
_MOST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class TechniqueRow:
    """One technique in the summary of a plan."""

    name: str
    title: str
    saved_bytes: int
    seconds: float  # added to a step, negative if time is saved
    why: str


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    techniques: tuple[Technique, ...]
    device: str
    batch_rows: int
    budget_bytes: int
    host_budget_bytes: int
    peak_bytes: int  # predicted
    step_s: float  # predicted
    plain_peak_bytes: int  # 0: not even one row could run through one block, or through the loss
    plain_step_s: float
    host_bytes: int = 0
    torch: str = ""  # version that it was made with
    rows: tuple[TechniqueRow, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        body = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("techniques", "rows")}
        techniques = [{"name": technique.name, "settings": technique.settings()} for technique in self.techniques]
        return {"version": _VERSION, **body, "techniques": techniques, "rows": [vars(row) for row in self.rows]}

    def save(self, path: str | Path, *, force: bool = False) -> None:
        with results_in_place():
            if Path(path).exists() and not force:
                raise OutputExists(f"{path} is there already.", hint="Give another name, or force=True.")
            Path(path).write_text(json.dumps(self.to_json(), indent=2, default=dict) + "\n", "utf-8")


def given_plan(plan: Any) -> FitPlan:
    """Return the plan that was given as `plan=`: itself, or the file that holds it."""
    if isinstance(plan, FitPlan):
        return plan
    if isinstance(plan, str | Path):
        return read_plan(plan)
    raise RequestError(
        f"plan= takes a plan or the file that holds it, and got {type(plan).__name__}.",
        hint='Give fitted.plan, or what fitted.save("plan.json") wrote.',
    )


def read_plan(path: str | Path) -> FitPlan:
    """Read a saved plan; raises RequestError if the file is not a plan."""
    try:
        body = parse_json(read_bytes(Path(path), _MOST_BYTES))
    except Unreadable as error:
        raise RequestError(f"{path} {error}.", hint="Give the file that Plan.save wrote.") from None
    return plan_from_json(body, str(path))


def plan_from_json(body: Any, name: str = "the plan") -> FitPlan:
    if not isinstance(body, dict) or body.get("version") != _VERSION:
        raise RequestError(f"{name} is no plan of this version ({_VERSION}).", hint="Make it again with tonnage.fit.")
    try:
        fields = {key: value for key, value in body.items() if key not in ("version", "techniques", "rows")}
        techniques = tuple(make(entry["name"], entry["settings"]) for entry in body["techniques"])
        return FitPlan(techniques=techniques, rows=tuple(TechniqueRow(**row) for row in body.get("rows", ())), **fields)
    except (KeyError, TypeError) as error:
        raise RequestError(f"{name} is damaged: {error}.", hint="Make it again with tonnage.fit.") from None


def assemble(solution: Solution, survey: Survey, division: MicroBatches) -> tuple[Technique, ...]:
    """Return the techniques beyond those already applied. `division` says how to divide a batch; its count is ignored."""
    layout, placement = solution.layout, solution.placement
    modes = dict(zip(survey.sizes[min(survey.sizes)].kinds, solution.choice.modes, strict=True))
    techniques: list[Technique] = []
    # Each block's mode: what runs again, and what is offloaded.
    on_gpu = {block: {BLOCK_OFFLOAD: BLOCK, OFFLOAD: KEEP}.get(mode, mode) for block, mode in modes.items()}
    recomputed = {block: recompute_mode(mode) for block, mode in on_gpu.items() if mode != KEEP}
    if recomputed:
        techniques.append(Recompute(modes=recomputed, slices=layout.slices if layout.sliced else 1))
    offloads: tuple[tuple[str, Literal["kept", "inputs"]], ...] = ((OFFLOAD, "kept"), (BLOCK_OFFLOAD, "inputs"))
    for mode, what in offloads:
        blocks = tuple(block for block, taken in modes.items() if taken == mode)
        if blocks:
            techniques.append(ActivationOffload(blocks=blocks, what=what, window_bytes=solution.window_bytes))
    # Placement of gradients and states.
    if placement == STEP_IN_BACKWARD:
        techniques.append(StepInBackward())
    elif placement.splits_states:
        on_host = placement == HOST_GRADIENTS
        techniques.append(
            HostStates(
                gpu_bytes=solution.states_on_gpu_bytes,
                how="host" if on_host else "device",
                gradients="host" if on_host and layout.micro_batches > 1 else "device",
                piece_bytes=PIECE_BYTES,
                window_bytes=WINDOW_BYTES,
            )
        )
    if layout.micro_batches > 1:
        techniques.append(replace(division, count=layout.micro_batches))
    return tuple(techniques)
