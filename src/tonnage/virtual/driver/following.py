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
        as_tensors = self._numbers_as_tensors(operator)
        if hasattr(torch.library, "get_kernel"):
            plain = torch.library.get_kernel(operator._name, key).call_boxed

            def kernel(keys: Any, *given: Any, **keywords: Any) -> Any:
                arguments = as_tensors(given)
                return wrapper(operator, lambda: plain(keys, *arguments, **keywords), arguments, keywords)

        else:
            wrappers, above = self._above[operator], torch._C.DispatchKey.BackendSelect
            wrappers[getattr(torch._C.DispatchKey, key)] = wrapper
            if len(wrappers) > 1:
                return  # the operator's kernel is registered already
            plain, key = operator.redispatch, "BackendSelect"

            def kernel(keys: Any, *given: Any, **keywords: Any) -> Any:
                arguments, below = as_tensors(given), keys.remove(above)
                wrapper = wrappers.get(below.highestPriorityTypeId())
                if wrapper is None:
                    return plain(below, *arguments, **keywords)
                return wrapper(operator, lambda: plain(below, *arguments, **keywords), arguments, keywords)

        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about every replaced kernel
            self._libraries[namespace].impl(operator, kernel, key, with_keyset=True)

    def release(self) -> None:
        for library in self._libraries.values():
            library._destroy()

    def _numbers_as_tensors(self, operator: Any) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """Convert numbers to tensors: `x * 2` passes a number where torch's kernels take a tensor."""
        places = [at for at, argument in enumerate(operator._schema.arguments) if str(argument.type) == "Tensor"]

        def change(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            for at in places:
                if at < len(arguments) and isinstance(arguments[at], (bool, int, float, complex)):
                    made = self._as_tensor(arguments[at], arguments[1 if at == 0 else 0])
                    arguments = (*arguments[:at], made, *arguments[at + 1 :])
            return arguments

        return change

    def _as_tensor(self, number: complex, operand: Any) -> Any:
        """Convert a number to a tensor that affects type promotion as the number does beside this operand."""
        torch = self._torch
        widest = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
        plain = torch._C._VariableFunctions
        made = plain.tensor(number, dtype=widest[type(number)], device="cpu")
        dtype = plain.result_type(operand, number) if isinstance(operand, torch.Tensor) else None
        if dtype is None:
            dtype = plain.result_type(number, number)
        # Numbers that are too large for the type wrap around, as in torch's kernels.
        return made.to(dtype)
