"""`tonnage.fit(...)`: make a training fit a byte budget, at the least cost in speed, without changing its gradients.

The package is called like the function that it is about, so it answers a call itself:

    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget="40 GiB")

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
