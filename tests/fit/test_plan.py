import json
from pathlib import Path
from typing import Any

import pytest

from tonnage.errors import OutputExists, RequestError
from tonnage.fit.plan import FitPlan, TechniqueRow, plan_from_json, read_plan
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.nvme import Nvme
from tonnage.fit.techniques.recompute import Recompute


def make_plan(*techniques: Technique, **changed: Any) -> FitPlan:
    fields: dict[str, Any] = {
        "device": "NVIDIA H200",
        "batch_rows": 8,
        "budget_bytes": 40 << 30,
        "host_budget_bytes": 64 << 30,
        "peak_bytes": 39 << 30,
        "step_s": 1.25,
        "plain_peak_bytes": 120 << 30,
        "plain_step_s": 1.0,
        "host_bytes": 1 << 30,
    }
    return FitPlan(techniques=techniques, **{**fields, **changed})


FULL = make_plan(
    ChunkedLoss(chunk_bytes=1 << 20),
    Recompute(modes={"layers.0": "block", "layers.1": ("3:aten.mm.default", 17)}, slices=2),
    ActivationOffload(blocks=("layers.0", "layers.1"), what="inputs"),
    HostStates(gpu_bytes=12345, how="device"),
    Nvme(directory="there", what="states"),
    MicroBatches(count=4),
    rows=(TechniqueRow(name="recompute", title="recompute in backward", saved_bytes=5, seconds=0.25, why="4 block"),),
)


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    FULL.save(tmp_path / "plan.json")
    found = read_plan(tmp_path / "plan.json")
    assert json.dumps(found.to_json(), default=dict) == json.dumps(FULL.to_json(), default=dict)
    assert [type(technique) for technique in found.techniques] == [type(technique) for technique in FULL.techniques]
    assert found.rows == FULL.rows


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("mine")
    with pytest.raises(OutputExists, match="is there already"):
        FULL.save(path)
    assert path.read_text() == "mine"
    FULL.save(path, force=True)
    assert read_plan(path).batch_rows == 8


def _changed(change: Any) -> Any:
    body = json.loads(json.dumps(FULL.to_json(), default=dict))
    change(body)
    return body


BROKEN = {
    "another version": (_changed(lambda body: body.update(version=99)), "no plan of this version"),
    "a list": ([], "no plan of this version"),
    "a field too few": (_changed(lambda body: body.pop("peak_bytes")), "damaged: .*peak_bytes"),
    "a field too many": (_changed(lambda body: body.update(colour="red")), "damaged: .*colour"),
    "an unknown technique": (
        _changed(lambda body: body["techniques"].append({"name": "magic", "settings": {}})),
        "no technique 'magic'",
    ),
    "an unknown setting": (
        _changed(lambda body: body["techniques"][0]["settings"].update(colour="red")),
        "chunked-loss has no setting 'colour'",
    ),
    "a technique without a name": (_changed(lambda body: body["techniques"].append({})), "damaged"),
}


@pytest.mark.parametrize(("body", "words"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_plan_is_said(body: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        plan_from_json(body)


def test_a_file_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_plan(tmp_path / "nowhere.json")
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(RequestError, match="is not JSON"):
        read_plan(tmp_path / "text.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="is not text"):
        read_plan(tmp_path / "bytes.json")
