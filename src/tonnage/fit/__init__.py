"""`tonnage.fit(...)`: make a training fit a byte budget, at the least cost in speed, without changing its gradients.

The package has the name of its main function, so it is callable itself:

    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget="40 GiB")

Its folders are its steps:

    survey/      measure each block, the rest of the model and the optimizer separately
    choose/      solve for the fastest set of techniques within the budgets
    techniques/  one file each, applied and undone in place; built on layers/, moving/, recomputing/, stepping/
    prove/       rehearse a step to measure the peak, and compare gradients with the plain model's

With `mesh=` it shards over ranks (`sharding.fitting`), with `engine="deepspeed"` it runs DeepSpeed
(`sharding.deepspeed`).
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from tonnage.fit import calling


class _CallablePackage(ModuleType):
    __signature__ = inspect.signature(calling.fit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return calling.fit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
