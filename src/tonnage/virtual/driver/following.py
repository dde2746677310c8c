"""Wraps kernels of torch's dispatcher, so that calls of an operator can be observed.

Since torch 2.9 a kernel can be retrieved (`torch.library.get_kernel`), and the wrapper replaces it. Before that, the
wrapper is registered above the kernels of all devices, on the key BackendSelect: it comes after autograd, and every
thread includes it. Host operators then go through Python too, which costs some microseconds each.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

# Arguments of a wrapper: the operator, a call of torch's own kernel, the arguments and the keywords.
Run = Callable[[], Any]
Keywords = dict[str, Any]
Wrapper = Callable[[Any, Run, Any, Keywords], Any]


class Follower:
    """The wrapped kernels of one session."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._libraries: dict[str, Any] = {}
        # By operator: the wrappers above its kernels, by dispatch key.
        self._above: dict[Any, dict[Any, Wrapper]] = defaultdict(dict)

    def follow(self, namespace: str, name: str, key: str, wrapper: Wrapper) -> None:
        """Call the wrapper instead of an operator's kernel on this dispatch key."""
        torch = self._torch
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if operator is None or has_kernel(f"{namespace}::{name}", "CompositeImplicitAutograd"):
            return  # missing in this version of torch, or composed of operators that are followed themselves
        if hasattr(torch.library, "get_kernel"):
            self._stand_in_place(operator, key, wrapper)
        else:
            self._stand_above(operator, key, wrapper)

    def release(self) -> None:
        """Restore the kernels."""
        for library in self._libraries.values():
            library._destroy()

    def _stand_in_place(self, operator: Any, key: str, wrapper: Wrapper) -> None:
        plain = self._torch.library.get_kernel(operator._name, key).call_boxed
        as_tensors = self._numbers_as_tensors(operator)

        def kernel(keys: Any, *given: Any, **keywords: Any) -> Any:
            arguments = as_tensors(given)
            return wrapper(operator, lambda: plain(keys, *arguments, **keywords), arguments, keywords)

        self._register(operator, kernel, key)

    def _stand_above(self, operator: Any, key: str, wrapper: Wrapper) -> None:
        wrappers = self._above[operator]
        wrappers[getattr(self._torch._C.DispatchKey, key)] = wrapper
        if len(wrappers) > 1:
            return  # the operator's kernel is registered already
        above = self._torch._C.DispatchKey.BackendSelect
        plain = operator.redispatch
        as_tensors = self._numbers_as_tensors(operator)

        def kernel(keys: Any, *given: Any, **keywords: Any) -> Any:
            arguments = as_tensors(given)
            below = keys.remove(above)
            wrapper = wrappers.get(below.highestPriorityTypeId())
            if wrapper is None:
                return plain(below, *arguments, **keywords)
            return wrapper(operator, lambda: plain(below, *arguments, **keywords), arguments, keywords)

        self._register(operator, kernel, "BackendSelect")

    def _register(self, operator: Any, kernel: Callable[..., Any], key: str) -> None:
        if operator.namespace not in self._libraries:
            self._libraries[operator.namespace] = self._torch.library.Library(operator.namespace, "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about every replaced kernel
            self._libraries[operator.namespace].impl(operator, kernel, key, with_keyset=True)

    def _numbers_as_tensors(self, operator: Any) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """Convert numbers to tensors: `x * 2` passes a number where torch's kernels take a tensor."""
        torch = self._torch
        places = [at for at, argument in enumerate(operator._schema.arguments) if str(argument.type) == "Tensor"]

        def change(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            for at in places:
                if at < len(arguments) and isinstance(arguments[at], (bool, int, float)):
                    number = _as_tensor(torch, arguments[at], arguments[1 if at == 0 else 0])
                    arguments = (*arguments[:at], number, *arguments[at + 1 :])
            return arguments

        return change


def _as_tensor(torch: Any, number: float, beside: Any) -> Any:
    """Convert a number to a host tensor that affects type promotion as the number would."""
    dtype = beside.dtype if isinstance(beside, torch.Tensor) else None
    keeps = dtype is not None and (
        dtype.is_floating_point
        or dtype.is_complex
        or isinstance(number, bool)
        or (isinstance(number, int) and dtype != torch.bool)
    )
    return torch._C._VariableFunctions.tensor(number, dtype=dtype if keeps else None)
