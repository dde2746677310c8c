"""Caches transformers' index of its own modules between runs.

At every import transformers reads its 3,100 files to find where each name is defined: a second, with the same result
for an installed version. An editable checkout is always read, because changes there are not detected.
"""

import contextlib
import functools
import hashlib
import marshal
import os
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from tonnage.virtual.cache import cache_folder


def keep_index(module: ModuleType) -> None:
    """Make `transformers.utils.import_utils` read the index of all models from the cache."""
    models = Path(str(module.__file__)).parents[1] / "models"
    if not {"site-packages", "dist-packages"} & set(models.parts):
        return
    make = module.define_import_structure
    stamp = f"{models} {version('transformers')} {models.stat().st_mtime_ns} {marshal.version}"
    kept = cache_folder() / f"transformers-{hashlib.sha256(stamp.encode()).hexdigest()[:20]}.index"

    def whole_index() -> Any:
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
            if index := marshal.loads(kept.read_bytes()):
                return index
        index, scratch = make(str(models)), kept.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # with a full or read-only disk, the next run just takes a second longer
            scratch.write_bytes(marshal.dumps(index))
            scratch.replace(kept)
        return index

    @functools.lru_cache
    def define_import_structure(module_path: Any, prefix: str | None = None) -> Any:
        if Path(module_path) not in (models, models / "__init__.py"):
            return make(module_path, prefix)
        index = whole_index()
        if prefix is None:
            return index
        return {needs: {f"{prefix}.{name}": names for name, names in files.items()} for needs, files in index.items()}

    module.define_import_structure = define_import_structure  # type: ignore[attr-defined]
