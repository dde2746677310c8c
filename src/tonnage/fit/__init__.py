"""`tonnage.fit(...)`: make a training fit a byte budget, at the least cost in speed, without changing its gradients.

The package is called like the function that it is about, so it answers a call itself:

    fitted = tonnage.fit(model, optimizer, loss=loss, sample=batch, budget="40 GiB")

With `mesh=` it shards over ranks (`sharding.fitting`), with `engine="deepspeed"` it runs DeepSpeed (`sharding.deepspeed`).
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, mesh: Any = None, engine: str = "torch", **kwargs: Any) -> Any:
        if engine != "torch":
            from tonnage.fit.sharding.deepspeed import fit_with_engine

            return fit_with_engine(engine, *args, mesh=mesh, **kwargs)
        if mesh is not None:
            from tonnage.fit.sharding.fitting import fit_on_mesh

            return fit_on_mesh(*args, mesh=mesh, **kwargs)
        from tonnage.fit.fitting import fit

        return fit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
