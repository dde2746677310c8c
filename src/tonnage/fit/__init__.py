"""`tonnage.fit(...)`: make a training fit a byte budget, at the least cost in speed, without changing its gradients.

The package has the name of its main function, so it is callable itself:

    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget="40 GiB")

Its folders are its steps:

    survey/      measure each block, the rest of the model and the optimizer separately
    choose/      solve for the fastest set of techniques within the budgets
    techniques/  one file each, applied and undone in place; built on layers/, moving/, recomputing/, stepping/
    prove/       rehearse a step to measure the peak, and compare gradients with the plain model's

With `mesh=` it shards over ranks (`sharding.fitting`), with `engine="deepspeed"` it runs DeepSpeed
(`sharding.deepspeed`). Importing this does not import torch, so that `help(tonnage)`, `inspect.signature` and editors
show it in any environment.
"""

import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tonnage.errors import RequestError, TonnageError, missing_part

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from tonnage.fit.fitted import Fitted
    from tonnage.fit.plan import FitPlan
    from tonnage.fit.sharding.shard import Shard
    from tonnage.fit.stepping.batches import Weighting
    from tonnage.fit.training import Batch, Loss


def fit(
    model: "nn.Module",
    optimizer: "Optimizer | None",
    *,
    loss: "Loss",
    sample: "Batch",
    budget: str | int | None = None,
    host: str | int | None = None,
    exact: bool = True,
    allow: Sequence[str] = (),
    without: Sequence[str] = (),
    clip_norm: float | None = None,
    weighting: "Weighting" = "auto",
    dropout: str = "same",
    plan: "FitPlan | str | Path | None" = None,
    measure: bool = True,
    verbose: bool = False,
    mesh: "DeviceMesh | None" = None,
    shard: "Shard | None" = None,
    engine: str = "torch",
    config: "Mapping[str, Any] | str | Path | None" = None,
) -> "Fitted":
    """Make a training fit a byte budget at the least cost in speed, without changing its gradients.

    | argument    | means                                                                                     |
    |-------------|-------------------------------------------------------------------------------------------|
    | `loss`      | `loss(model, batch)` returns a scalar                                                     |
    | `sample`    | a batch as the training loop passes it to `step`                                          |
    | `budget`    | what PyTorch may reserve on the GPU: "40 GiB", or "80%" of what it can use (default: all) |
    | `host`      | host memory that may be pinned (default: what is free)                                    |
    | `exact`     | False: also allow techniques that change the numerics (8-bit states, FP8)                 |
    | `allow`     | names of such techniques to allow one by one                                              |
    | `without`   | names of techniques to leave out                                                          |
    | `clip_norm` | clip the norm of the gradients, as `clip_grad_norm_` would                                |
    | `weighting` | the weight of a part of a divided batch, if not detected ("rows", a function)             |
    | `dropout`   | "resampled": parts of a divided batch may use other random numbers, as in accumulation    |
    | `plan`      | apply this plan instead of choosing one                                                   |
    | `measure`   | False: no rehearsal and no proof; the peak stays a prediction                             |
    | `verbose`   | print what is tried                                                                       |
    | `mesh`      | shard over the ranks of this mesh, and fit each of them                                   |
    | `shard`     | with `mesh`: how to shard (default: the fastest way that fits)                            |
    | `engine`    | "deepspeed": DeepSpeed runs the training with its `config`; returns an `EngineFitted`     |
    """
    given = {name: value for name, value in locals().items() if value is not signature(fit).parameters[name].default}
    given.pop("engine", None)
    if engine not in ("torch", "deepspeed"):
        raise RequestError(f"There is no engine {engine!r}.", hint='Known are "torch" (unless told) and "deepspeed".')
    if engine == "deepspeed" and mesh is not None:
        raise RequestError("DeepSpeed shards over all ranks, and makes no use of a mesh.", hint="Leave mesh= out.")
    callee: Any  # its defaults are those above
    try:
        if engine == "deepspeed":
            from tonnage.fit.sharding.deepspeed import fit_with_deepspeed as callee
        elif "mesh" in given:
            from tonnage.fit.sharding.fitting import fit_on_mesh as callee
        else:
            from tonnage.fit.fitting import fit as callee
    except ModuleNotFoundError as error:
        raise missing_part("tonnage.fit", error) from error
    try:
        fitted: Fitted = callee(**given)
    except TonnageError as error:
        # Its message says what is wrong, and the caller's line where: the frames of fit itself would hide both.
        raise error.with_traceback(None)  # noqa: B904
    return fitted


class _CallablePackage(ModuleType):
    __signature__ = signature(fit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return fit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
