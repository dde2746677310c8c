"""Parts of compiled blocks are measured eagerly, and compiled only once they are chosen."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from fit.survey.test_survey_sizes import size
from tonnage.fit.survey.profile import BlockProfile
from tonnage.fit.survey.survey import KEEP, Survey
from tonnage.fit.techniques.recompute import Recompute


class Counted(Survey):
    """A survey whose blocks take half as much compiled; a mode recomputed leaves half again."""

    full_eagerly = False

    def __init__(self, applied: Collection[str]) -> None:
        self.training: Any = SimpleNamespace(applied=applied, sample={"x": torch.zeros(8, 1)})
        self.blocks = {"0": nn.ModuleDict({"mlp": nn.Linear(1, 1), "attn": nn.Linear(1, 1)})}
        self.sizes, self.supposed = {8: size(8)}, set()
        self._ways_at, self.outside, self._eager_ways = {}, {}, set()
        self.compiled: list[str] = []

    @contextmanager
    def _calls_at(self, rows: int) -> Iterator[Any]:
        kind = self.sizes[8].kinds["0"]
        yield None, SimpleNamespace(by_kind={kind: ("0", None)})

    def _operator_modes(self, block: nn.Module, call: Any) -> list[str]:
        return []

    def _measure_modes(self, name: str, call: Any, modes: Collection[str]) -> dict[str, BlockProfile]:
        eagerly = torch._dynamo.eval_frame._stance.stance == "force_eager"
        if eagerly and self.full_eagerly:
            raise torch.OutOfMemoryError
        if not eagerly:
            self.compiled += modes
        kept = size(8).kept("0")
        kept = kept if eagerly else replace(kept, kept_bytes=kept.kept_bytes // 2)
        return {KEEP: kept} | {mode: replace(kept, kept_bytes=kept.kept_bytes // 2) for mode in modes}

    def kept_bytes(self) -> dict[str, int]:
        (ways,) = self.sizes[8].blocks.values()
        return {mode: way.kept_bytes for mode, way in ways.items()}


@pytest.fixture(autouse=True)
def dynamo() -> None:
    import torch._dynamo  # noqa: F401  # a stance is only taken where something may be compiled


def test_nothing_is_compiled_before_it_is_chosen() -> None:
    survey, whole = Counted(["compile"]), size(8).kept("0").kept_bytes
    survey.detail(8)
    assert survey.compiled == []
    assert survey.eager_modes(8, {KEEP, "part:mlp", "block"}) == {"part:mlp"}
    assert survey.kept_bytes() == {KEEP: whole, "part:mlp": whole // 2, "part:attn": whole // 2}

    survey.compile_modes(8, {"part:mlp"})
    assert survey.compiled == ["part:mlp"]
    assert survey.eager_modes(8, {"part:mlp", "part:attn"}) == {"part:attn"}
    ways = survey._ways_at[8]["Block|a"]
    assert {mode: way.kept_bytes for mode, way in ways.items()} == dict.fromkeys(ways, whole // 4) | {KEEP: whole // 2}


def test_where_there_is_no_room_to_run_them_eagerly_they_are_compiled_at_once() -> None:
    survey = Counted(["compile"])
    survey.full_eagerly = True
    survey.detail(8)
    assert survey.compiled == ["part:mlp", "part:attn"]
    assert not survey.eager_modes(8, {"part:mlp", "part:attn"})


def test_blocks_that_are_not_compiled_are_measured_once() -> None:
    survey = Counted([])
    survey.detail(8)
    assert survey.is_detailed(8)
    assert not survey.eager_modes(8, {"part:mlp", "part:attn"})


def test_a_block_that_computes_a_part_twice_is_never_faster_than_one_that_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A card that idled while code was compiled has a higher clock, and the mode measured then looked faster."""
    kept = replace(size(8).kept("0"), forward_s=1.0, backward_s=2.0)
    half = replace(kept, kept_bytes=kept.kept_bytes // 2)
    measured = iter([kept, replace(half, forward_s=0.9, backward_s=1.8), replace(half, backward_s=2.5)])
    monkeypatch.setattr("tonnage.fit.survey.measuring.measure_block", lambda meter, call: next(measured))
    monkeypatch.setattr(Recompute, "apply", lambda self, training: lambda: None)
    survey: Any = SimpleNamespace(meter=None, training=None)
    ways = Survey._measure_modes(survey, "0", cast(Any, None), ["part:mlp", "part:attn"])
    seconds = {mode: way.forward_s + way.backward_s for mode, way in ways.items()}
    assert seconds[KEEP] == 3.0 < seconds["part:mlp"] < 3.01
    assert seconds["part:attn"] == 3.5


def test_a_delay_is_charged_to_the_parts_that_were_recomputed() -> None:
    survey = Counted([])
    assert not survey.charge(8, ["block", "block"], 1.0), "nothing was measured in parts"
    survey.detail(8)
    before = {mode: way.backward_s for mode, way in survey._ways_at[8]["Block|a"].items()}
    survey.sizes[4] = replace(size(4), kinds=survey.sizes[8].kinds, blocks=survey.sizes[8].blocks)
    assert not survey.charge(8, [KEEP, KEEP], 1.0)
    assert survey.charge(4, ["part:mlp", "part:mlp"], 1.0)
    ways = survey._ways_at[8]["Block|a"]
    charged = {mode: way.backward_s - before[mode] for mode, way in ways.items()}
    assert charged == pytest.approx({KEEP: 0, "part:mlp": 1.0, "part:attn": 0}), "half of it, at twice the rows"
    (kept,) = survey.sizes[8].blocks.values()
    assert kept["part:mlp"].backward_s == ways["part:mlp"].backward_s
