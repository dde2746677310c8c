"""Stand-ins for a few functions of torch._dynamo, which takes a second to import.

Optimizers, checkpoints and transformers ask it only for decorators. Until something is compiled they get stand-ins;
what these recorded is replayed when Dynamo's code runs.
"""

import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_told: list[Callable[[ModuleType], None]] = []


def answers() -> dict[str, Any]:
    """Return the stand-ins, by attribute of torch._dynamo."""
    return {
        "disable": _disable,
        "allow_in_graph": functools.partial(_mark, "allow_in_graph"),
        "assume_constant_result": functools.partial(_mark, "assume_constant_result"),
        "graph_break": lambda *_, **__: None,
        "reset": lambda: None,
        "is_compiling": lambda: False,
    }


def pass_on(dynamo: ModuleType) -> None:
    """Replay the recorded calls, now that Dynamo's code has run."""
    while _told:
        _told.pop(0)(dynamo)


def _mark(name: str, function: Any = None) -> Any:
    if function is None:
        return functools.partial(_mark, name)
    _told.append(lambda dynamo: getattr(dynamo, name)(function))
    return function


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """Replace `torch._dynamo.disable`: Dynamo skips the function, even if it is loaded later."""
    if fn is None:
        return functools.partial(_disable, recursive=recursive, **options)
    if not isinstance(fn, FunctionType):
        import torch._dynamo.eval_frame  # importing the submodule runs the package's code

        return torch._dynamo.disable(fn, recursive, **options)
    target = fn

    @functools.wraps(fn)
    def disabled(*arguments: Any, **keywords: Any) -> Any:
        return target(*arguments, **keywords)

    def disable(dynamo: ModuleType) -> None:
        nonlocal target
        target = dynamo.disable(fn, recursive, **options)
        dynamo.eval_frame.skip_code(disabled.__code__)  # type: ignore[attr-defined]

    disabled._torchdynamo_disable = True  # type: ignore[attr-defined]
    disabled._torchdynamo_orig_callable = fn  # type: ignore[attr-defined]
    _told.append(disable)
    return disabled
