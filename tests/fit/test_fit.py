"""What `tonnage.fit` takes is what the functions behind it take, with the same defaults."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

pytest.importorskip("torch")

import tonnage
from tonnage.fit.fitting import FitOptions
from tonnage.fit.sharding.deepspeed import fit_with_deepspeed
from tonnage.fit.sharding.fitting import fit_on_mesh


@pytest.mark.parametrize("function", [FitOptions, fit_on_mesh, fit_with_deepspeed])
def test_every_argument_is_there_with_its_default(function: Callable[..., Any]) -> None:
    taken = signature(tonnage.fit).parameters
    for name, parameter in signature(function).parameters.items():
        assert name in taken
        if parameter.default is not parameter.empty:
            assert taken[name].default == parameter.default


def test_an_argument_of_another_engine_is_refused() -> None:
    with pytest.raises(TypeError, match="shard"):
        tonnage.fit(None, None, loss=None, sample=None, shard=object())


def test_an_engine_that_there_is_not_is_refused() -> None:
    with pytest.raises(tonnage.TonnageError, match="no engine 'megatron'"):
        tonnage.fit(None, None, loss=None, sample=None, engine="megatron")
