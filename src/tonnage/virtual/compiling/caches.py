"""What torch.compile keeps, on disk and in memory: none of it may come from another card, none may reach a real one.

Inductor gets an empty folder for each run, as on a machine that has never compiled the script: there it times kernels,
which takes memory. In the user's own folder the timings of a virtual GPU would do harm. Triton's binaries depend on
nothing but source, options and the kind of card, so they are kept.
"""

import functools
import os
import shutil
import sys
import tempfile
from types import ModuleType

from tonnage.virtual.cache import cache_folder
from tonnage.virtual.cuda import forks
from tonnage.virtual.cuda.patches import Patches

# Modules that remember answers of a card in functools.cache: its properties, whether Triton can use it.
_REMEMBERING = ("torch._inductor.", "torch._dynamo.device_interface", "torch.utils._triton")


def install(patches: Patches) -> str:
    """Name folders of our own in the environment, forget what was compiled for another card; returns Inductor's folder."""
    folder = tempfile.mkdtemp(prefix="inductor-", dir=cache_folder())
    patches.on_undo(lambda: shutil.rmtree(folder, ignore_errors=True))
    patches.set_item(os.environ, "TORCHINDUCTOR_CACHE_DIR", folder)
    patches.set_item(os.environ, "TRITON_CACHE_DIR", str(cache_folder() / "triton"))
    with forks.untouched():  # resetting Dynamo asks for the card
        forget()
    patches.on_undo(forget)
    return folder


def keep_folder(cache_dir_utils: ModuleType, folder: str, patches: Patches) -> None:
    """Keep Inductor in this folder, even if the script names one in the environment."""
    plain, is_open = cache_dir_utils.cache_dir, True

    def cache_dir() -> str:
        return folder if is_open else plain()  # others have imported this function by its name, and keep it

    def close() -> None:
        nonlocal is_open
        is_open = False

    patches.set(cache_dir_utils, "cache_dir", cache_dir)
    patches.on_undo(close)


def forget() -> None:
    """Drop compiled functions and remembered answers about the card, where anything was compiled at all."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_REMEMBERING):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    if "torch._dynamo.eval_frame" in sys.modules:
        interface = sys.modules["torch._dynamo.device_interface"]
        interface.caching_worker_device_properties.clear()
        sys.modules["torch._dynamo"].reset()
