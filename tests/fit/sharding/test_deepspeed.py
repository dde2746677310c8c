"""DeepSpeed under fit: steps of one process, a clear word where it is missing or asked for nonsense."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tonnage
from exports import ENGINES
from fit.sharding import deepspeed_steps
from tonnage.errors import MissingPart, RequestError

# FP32 throughout, sums in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    assert ENGINES.is_dir(), "the engines are not installed: run `make setup`"
    folder = tmp_path_factory.mktemp("deepspeed")
    with socket.socket() as meeting:
        meeting.bind(("127.0.0.1", 0))
        port = str(meeting.getsockname()[1])
    seen = os.pathsep.join([str(ENGINES), os.environ.get("PYTHONPATH", "")])
    known = {**os.environ, "PYTHONPATH": seen, "CUDA_VISIBLE_DEVICES": ""}
    commands = [[sys.executable, deepspeed_steps.__file__, str(rank), port, str(folder)] for rank in range(2)]
    with (folder / "said.txt").open("w") as said:
        ranks = [subprocess.Popen(command, env=known, stdout=said, stderr=said) for command in commands]
        codes = [rank.wait(timeout=200) for rank in ranks]
    assert codes == [0, 0], (folder / "said.txt").read_text()[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", deepspeed_steps.STAGES)
def test_steps_are_those_of_one_process_though_batches_differ_and_one_lacks(found: list[Any], stage: str) -> None:
    assert [rank[stage]["steps"] for rank in found] == [3, 2]
    for rank in found:
        assert max(rank[stage]["loss"], rank[stage]["parameters"]) <= TOLERANCE


def test_the_error_of_one_rank_reaches_the_other(found: list[Any]) -> None:
    told = [rank["failure"] for rank in found]
    assert told == ["RankFailed: Rank 1 raised ZeroDivisionError: in forward", "ZeroDivisionError: in forward"]


def fit(**changed: Any) -> Any:
    model = nn.Linear(2, 2)
    optimizer = changed.pop("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    request: dict[str, Any] = {"engine": "deepspeed", "config": {}, "sample": torch.ones(2, 2), **changed}
    return tonnage.fit(model, optimizer, loss=lambda model, batch: model(batch).sum(), **request)


def test_where_deepspeed_is_missing_that_is_said() -> None:
    with pytest.raises(MissingPart, match="needs DeepSpeed, which is not installed") as caught:
        fit()
    assert caught.value.hint == "pip install deepspeed"


def test_what_makes_no_sense_is_said(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no engine 'deep'"):
        fit(engine="deep")
    with pytest.raises(RequestError, match="no use of a mesh"):
        fit(mesh="cpu")
    with pytest.raises(RequestError, match="describes an optimizer, and SGD was given besides"):
        fit(config={"optimizer": {"type": "AdamW"}})
    with pytest.raises(RequestError, match="describes no optimizer, and none was given"):
        fit(optimizer=None)
    with pytest.raises(RequestError, match="DeepSpeed's own optimizer, not by SGD"):
        fit(config={"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(RequestError, match="is not JSON"):
        fit(config=tmp_path / "broken.json")
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        fit(config=tmp_path / "nowhere.json")
