"""`tonnage.fit(...)`: make a training fit a byte budget, at the least cost in speed, without changing its gradients.

The package is called like the function that it is about, so it answers a call itself:

    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget="40 GiB")

Its folders are its steps:

    survey/      what each block, the rest and the optimizer take, measured alone
    choose/      the fastest set of techniques within the budgets, solved from that
    techniques/  one file each, applied and undone in place; they are made of layers/, moving/, recomputing/, stepping/
    prove/       one rehearsed step shows the peak, and gradients are compared with the plain model's

With `mesh=` it shards over ranks (`sharding.fitting`), with `engine="deepspeed"` it runs DeepSpeed (`sharding.deepspeed`).
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
