"""Stand-ins for the optimizer operators that DeepSpeed compiles with nvcc at first use.

They update their arguments in place. Only LAMB's allocates on the card: two rows of partial norms and a coefficient
for each parameter. The others pass tensor lists as kernel arguments, or run on the host, where the values are not
needed.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

from tonnage.errors import NotModelled
from tonnage.virtual.standins import StandIns

_PARTIAL_NORMS = 512


def _update(*_: Any) -> int:
    return 0


def _lamb(parameter: Any, *_: Any) -> Any:
    import torch

    kind = torch.float32 if parameter.dtype == torch.float16 else parameter.dtype
    norms = [parameter.new_empty(_PARTIAL_NORMS, dtype=kind) for _ in range(2)]
    coefficient = parameter.new_empty(1, dtype=kind)
    del norms
    return coefficient


_OPERATORS: dict[str, dict[str, Any]] = {
    "fused_adam": {"multi_tensor_adam": _update},
    "fused_lion": {"multi_tensor_lion": _update},
    "fused_lamb": {"lamb": _lamb},
    **{
        f"cpu_{name}": dict.fromkeys(
            (f"create_{name}", f"destroy_{name}", f"{name}_update", f"{name}_rollback"), _update
        )
        for name in ("adam", "adagrad", "lion")
    },
}


def supply(module: ModuleType, stand_ins: StandIns) -> None:
    """Make `deepspeed.ops.op_builder.builder` return a stand-in where it would compile an operator."""

    def jit_load(self: Any, verbose: bool = True) -> Any:
        functions = _OPERATORS.get(self.name)
        if functions is None:
            stand_ins.unmodelled(f"DeepSpeed's {self.name}", "compiled at first use")
            raise NotModelled(
                f"DeepSpeed compiles its operator {self.name} at first use, and it has no stand-in here.",
                hint=f"Leave it out for a virtual run. These have one: {', '.join(sorted(_OPERATORS))}.",
            )
        stand_ins.assume(f"DeepSpeed's {self.name}", "It is compiled at first use: a stand-in allocated what it does.")
        return SimpleNamespace(**functions)

    module.OpBuilder.jit_load = jit_load
