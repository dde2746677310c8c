"""Wraps kernels of torch's dispatcher, so that something can be noted around each call of an operator."""

import warnings
from collections.abc import Callable
from typing import Any

# What a wrapper gets: the operator, a call of torch's own kernel, and the arguments.
Wrapper = Callable[[Any, Callable[[], Any], Any, dict[str, Any]], Any]


class Follower:
    """The wrapped kernels of one owner. Before torch 2.9 kernels cannot be had, and nothing is followed."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._libraries: dict[str, Any] = {}

    def follow(self, namespace: str, name: str, key: str, wrapper: Wrapper) -> None:
        """Call the wrapper in the place of an operator's kernel on this dispatch key."""
        torch = self._torch
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if operator is None or has_kernel(f"{namespace}::{name}", "CompositeImplicitAutograd"):
            return  # of another version of torch, or made of operators that are followed themselves
        if not hasattr(torch.library, "get_kernel"):
            return
        plain = torch.library.get_kernel(f"{namespace}::{name}", key).call_boxed
        # Numbers arrive in the place of tensors where the script wrote `x * 2`, and torch's kernel takes tensors alone.
        places = [at for at, argument in enumerate(operator._schema.arguments) if str(argument.type) == "Tensor"]

        def kernel(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            for at in places:
                if at < len(arguments) and isinstance(arguments[at], (bool, int, float)):
                    number = _as_tensor(torch, arguments[at], arguments[1 if at == 0 else 0])
                    arguments = (*arguments[:at], number, *arguments[at + 1 :])
            return wrapper(operator, lambda: plain(keys, *arguments, **keywords), arguments, keywords)

        if namespace not in self._libraries:
            self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
            self._libraries[namespace].impl(name, kernel, key, with_keyset=True)

    def release(self) -> None:
        """Leave the kernels as they were."""
        for library in self._libraries.values():
            library._destroy()


def _as_tensor(torch: Any, number: float, beside: Any) -> Any:
    """A number as a tensor of the host, of a type that leaves an operator's type of result as the number would."""
    dtype = beside.dtype if isinstance(beside, torch.Tensor) else None
    keeps = dtype is not None and (
        dtype.is_floating_point
        or dtype.is_complex
        or isinstance(number, bool)
        or (isinstance(number, int) and dtype != torch.bool)
    )
    return torch.tensor(number, dtype=dtype if keeps else None)
