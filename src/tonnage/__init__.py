"""Tonnage: how much can this GPU carry?

Will it fit, where did the memory go, and why did it run out: before a GPU is rented.

    with tonnage.virtual_gpu("h200") as gpu:
        train()
    print(gpu.recording.peak_allocated_bytes)

`import tonnage` never imports torch; what needs it is loaded when it is first asked for.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tonnage.errors import TonnageError
    from tonnage.fit import fit
    from tonnage.fit.limits import largest_batch, longest_sequence
    from tonnage.hardware import Gpu, find_gpu
    from tonnage.integrations.fit_trainer import fit_trainer
    from tonnage.ledger import Category, Ledger
    from tonnage.recorder import record_on_oom
    from tonnage.recording import Recording, read_recording, write_recording
    from tonnage.script.assume import assume
    from tonnage.virtual import virtual_gpu

__version__ = "0.1.0"

# The module of each public name, loaded on first use, so that a command imports only what it needs.
_HOMES = {
    "Category": "tonnage.ledger",
    "Gpu": "tonnage.hardware",
    "Ledger": "tonnage.ledger",
    "Recording": "tonnage.recording",
    "TonnageError": "tonnage.errors",
    "assume": "tonnage.script.assume",
    "find_gpu": "tonnage.hardware",
    "fit_trainer": "tonnage.integrations.fit_trainer",
    "largest_batch": "tonnage.fit.limits",
    "load_ipython_extension": "tonnage.integrations.notebook",  # used by `%load_ext tonnage`
    "longest_sequence": "tonnage.fit.limits",
    "read_recording": "tonnage.recording",
    "record_on_oom": "tonnage.recorder",
    "virtual_gpu": "tonnage.virtual",
    "write_recording": "tonnage.recording",
}

__all__ = [
    "Category",
    "Gpu",
    "Ledger",
    "Recording",
    "TonnageError",
    "__version__",
    "assume",
    "find_gpu",
    "fit",
    "fit_trainer",
    "largest_batch",
    "longest_sequence",
    "read_recording",
    "record_on_oom",
    "virtual_gpu",
    "write_recording",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "fit":  # a callable package: its import sets this name
        return import_module("tonnage.fit")
    if name not in _HOMES:
        raise AttributeError(f"module 'tonnage' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    except ImportError as error:
        return _absent(name, error)
    return value


def _absent(name: str, error: ImportError) -> Callable[..., NoReturn]:
    """Return a placeholder for a function whose dependencies are missing: it has a docstring, and raises when called."""
    from tonnage.errors import missing_part

    def absent(*_: Any, **__: Any) -> NoReturn:
        raise missing_part(f"tonnage.{name}", error) from error

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = missing_part(f"tonnage.{name}", error).words
    return absent


def __dir__() -> list[str]:
    return __all__
