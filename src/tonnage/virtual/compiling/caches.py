"""The caches of torch.compile, on disk and in memory: entries must not be shared between a virtual and a real card.

Inductor gets an empty folder for each run, as on a machine that has never compiled the script: there it benchmarks
kernels, which takes memory. The timings of a virtual GPU would spoil the user's own folder. Triton's binaries depend
only on source, options and compute capability, so they are kept.
"""

import functools
import os
import shutil
import sys
import tempfile
from types import ModuleType

from tonnage.virtual.cache import cache_folder
from tonnage.virtual.cuda.devices import untouched
from tonnage.virtual.cuda.patches import Patches

# Modules that cache facts about a card with functools.cache: its properties, whether Triton supports it.
_REMEMBERING = ("torch._inductor.", "torch._dynamo.device_interface", "torch.utils._triton")


def install(patches: Patches) -> str:
    """Set cache folders in the environment and drop what was compiled for another card; return Inductor's folder."""
    folder = tempfile.mkdtemp(prefix="inductor-", dir=cache_folder())
    patches.on_undo(lambda: shutil.rmtree(folder, ignore_errors=True))
    patches.set_item(os.environ, "TORCHINDUCTOR_CACHE_DIR", folder)
    patches.set_item(os.environ, "TRITON_CACHE_DIR", str(cache_folder() / "triton"))
    with untouched():  # resetting Dynamo initialises CUDA
        forget()
    patches.on_undo(forget)
    return folder


def keep_folder(cache_dir_utils: ModuleType, folder: str, patches: Patches) -> None:
    """Make Inductor use this folder, even if the script sets another in the environment."""
    plain, is_open = cache_dir_utils.cache_dir, True

    def cache_dir() -> str:
        return folder if is_open else plain()  # other modules keep a reference to this function

    def close() -> None:
        nonlocal is_open
        is_open = False

    patches.set(cache_dir_utils, "cache_dir", cache_dir)
    patches.on_undo(close)


def forget() -> None:
    """Drop compiled functions and cached facts about the card, if anything was compiled."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_REMEMBERING):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    if "torch._dynamo.eval_frame" in sys.modules:
        interface = sys.modules["torch._dynamo.device_interface"]
        interface.caching_worker_device_properties.clear()
        sys.modules["torch._dynamo"].reset()
