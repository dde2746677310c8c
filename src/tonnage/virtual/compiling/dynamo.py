"""torch._dynamo takes a second to import, and optimizers, checkpoints and transformers ask it for decorators alone.

Until something is compiled they get stand-ins from here; what these were told is passed on when Dynamo's code runs.
"""

import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_told: list[Callable[[ModuleType], None]] = []


def answers() -> dict[str, Any]:
    """What to answer in Dynamo's place, by the attribute that is asked for."""
    return {
        "disable": _disable,
        "allow_in_graph": functools.partial(_mark, "allow_in_graph"),
        "assume_constant_result": functools.partial(_mark, "assume_constant_result"),
        "graph_break": lambda *_, **__: None,
        "reset": lambda: None,
        "is_compiling": lambda: False,
    }


def pass_on(dynamo: ModuleType) -> None:
    """Tell Dynamo, now that its code has run, what it would have been told before."""
    while _told:
        _told.pop(0)(dynamo)


def _mark(name: str, function: Any = None) -> Any:
    if function is None:
        return functools.partial(_mark, name)
    _told.append(lambda dynamo: getattr(dynamo, name)(function))
    return function


def _disable(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """`torch._dynamo.disable`: a function that Dynamo leaves alone, also if it begins to compile only later."""
    if fn is None:
        return functools.partial(_disable, recursive=recursive, **options)
    if not isinstance(fn, FunctionType):
        import torch._dynamo.eval_frame  # the submodule's import runs the package's code

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
