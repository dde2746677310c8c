"""`tonnage.fit(...)`: make a training fit a byte budget, at the least cost in speed, without changing its gradients.

The package is called like the function that it is about, so it answers a call itself:

    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget="40 GiB")
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tonnage.fit.fitting import fit

        return fit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
