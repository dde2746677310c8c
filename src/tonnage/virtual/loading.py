"""Builds and loads the native library and registers our kernels on the CUDA key, once per process.

It is built from `native/` and cached, once for each combination of torch, Python and compiler. The library must be
loaded before torch first asks for CUDA's hooks, so it is loaded before `import torch` if possible.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from tonnage.errors import MissingPart, NotModelled
from tonnage.garbage import no_collection
from tonnage.virtual.cache import built_once, cache_folder, make_safe
from tonnage.virtual.driver.loading import torch_root
from tonnage.virtual.driver.unwritten import DERIVES

SOURCES = Path(__file__).parent / "native"
UNITS = sorted(SOURCES.glob("*.cpp"))
# Shared with the stand-ins for CUDA's libraries.
SHARED = SOURCES.parent / "driver" / "native" / "draws.c"

# Implemented in the native library.
NATIVE = frozenset(
    "empty.memory_format empty_strided resize_ copy_ _local_scalar_dense native_dropout record_stream set_ "
    "set_.source_Storage set_.source_Tensor set_.source_Storage_storage_offset".split()
)
# These do not fill large host tensors; `DERIVES` leave results of unfilled tensors unfilled.
HOST_FILLS = "normal_ uniform_ exponential_ log_normal_ cauchy_ bernoulli_.float".split()
# Nested tensors: CUDA has its own kernels for these, which allocate what the host's code does.
NESTED_LIKE_HOST = ("bmm", "to_padded_tensor", "_nested_tensor_softmax_with_shape")


@cache
def load() -> ctypes.PyDLL:
    """Load the native library and register every kernel."""
    root = torch_root()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(root / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.PyDLL(str(native_library(root)), mode=ctypes.RTLD_GLOBAL)
    for name, result, arguments in (
        *((name, ctypes.c_int64, None) for name in ("current_stream", "new_stream")),
        ("set_stream", ctypes.c_int, [ctypes.c_int, ctypes.c_int64]),
        ("pinned_peak", ctypes.c_uint64, None),
        ("is_known", ctypes.c_bool, [ctypes.c_void_p]),
        ("forget", None, [ctypes.c_void_p]),
        ("mark_guessed", None, [ctypes.c_void_p]),
        ("law", ctypes.c_int32, [ctypes.c_void_p]),
        ("set_cudnn_version", ctypes.c_int, [ctypes.c_int64]),
        *((name, None, None) for name in ("start", "listen", "reset_host_stats", "empty_pinned_cache")),
    ):
        function = getattr(library, f"tonnage_{name}")
        function.restype, function.argtypes = result, arguments
    with no_collection():
        _keep_shape_rules(library)
        _register(library)
    return library


def _keep_shape_rules(library: ctypes.PyDLL) -> None:
    """Let the library keep torch's shape rules in C++, over which `import torch` puts slower ones in Python.

    If torch is imported already, its Python rules are lifted off for that moment.
    """
    if "torch" not in sys.modules:
        library.tonnage_keep_shape_rules()
        return
    import torch
    import torch._meta_registrations as registrations

    from tonnage.virtual.kernels.registry import operator_named

    in_python = registrations._meta_lib_dont_use_me_use_register_meta
    operators = [operator_named(key.split("/")[1]) for key in in_python._op_impls]
    in_python._destroy()
    library.tonnage_keep_shape_rules()
    again = torch.library.Library("aten", "IMPL", "Meta")
    for operator in operators:
        again.impl(operator, operator.py_kernels[torch._C.DispatchKey.Meta])
    registrations._meta_lib_dont_use_me_use_register_meta = again


def _register(library: ctypes.PyDLL) -> None:
    import torch  # after the library, see above

    from tonnage.virtual import kernels
    from tonnage.virtual.kernels import registry

    for module in iter_modules(kernels.__path__):
        import_module(f"{kernels.__name__}.{module.name}")  # fills the registry
    # In the native library
    operators = _operators()
    on_cuda = {entry.name for entry in operators if "CUDA" in entry.keys or entry.has_ufunc}
    names = [e.name for e in operators if e.name not in NATIVE and (e.name in on_cuda or e.delegate in on_cuda)]
    # Of sparse and nested tensors, those whose code is the same for host and CUDA.
    sparse, nested = ([e.name for e in operators if layout in e.shared] for layout in ("Sparse", "NestedTensor"))
    computed = [name for name in names if name not in registry.KERNELS]
    libraries = _lines(f"aten::{n} {lib}" for n, lib in kernels.LIBRARIES.items())
    library.tonnage_set_libraries(libraries)
    library.tonnage_register(_lines(computed), _lines({*names, *registry.KERNELS} - set(registry.SCHEMAS)))
    library.tonnage_register_fallback()
    library.tonnage_register_layouts(_lines(sparse), _lines([*nested, *NESTED_LIKE_HOST]))
    library.tonnage_register_host(_lines(HOST_FILLS), _lines(DERIVES))
    # In Python
    spaces = (("tonnage", "DEF"), ("aten", "IMPL"), ("_", "IMPL"))
    _libraries.extend(torch.library.Library(*space) for space in spaces)
    own, aten, everything = _libraries
    for name, schema in registry.SCHEMAS.items():
        own.define(schema)
        if name in registry.COMPOSITES:
            own.impl(name, registry.COMPOSITES[name], "CompositeImplicitAutograd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in registry.KERNELS.items():
            space, _, bare = name.rpartition("::")
            (own if space else aten).impl(bare, function, "CUDA")
        for name, function in registry.SPARSE_KERNELS.items():
            aten.impl(name, function, "SparseCUDA")
    for key in ("SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA"):
        everything.fallback(_refuse, key)


_libraries: list[Any] = []  # a torch.library.Library unregisters when it dies


def _refuse(operator: Any, *_: Any, **__: Any) -> None:
    """Raise NotModelled for other operators on sparse and nested tensors."""
    from tonnage.virtual.session import active

    active().stand_ins.unmodelled(str(operator), "not modelled for sparse and nested tensors")
    raise NotModelled(
        f"The virtual GPU does not model {operator} for sparse and nested tensors, and the script calls it on one.",
        hint="For a virtual run make the tensor dense (`to_dense()`), or its layout torch.jagged.",
    )


def _lines(names: Any) -> bytes:
    return "\n".join(n for n in names if not n.startswith("tonnage::")).encode()


# Operators with their own CUDA kernel, read from the list that ships with torch: in a build without CUDA they would
# fall through to composites that the card never runs, so each gets a kernel of ours on the CUDA key.


@dataclass
class _Entry:
    name: str
    keys: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)  # layouts whose code is the same for host and CUDA
    delegate: str = ""
    has_ufunc: bool = False


def _operators() -> list[_Entry]:
    """Read the few fields needed without a YAML parser: the file is regular, and this is thirty times as fast."""
    spec = importlib.util.find_spec("torchgen")
    assert spec and spec.submodule_search_locations, "torchgen ships with torch"
    path = Path(spec.submodule_search_locations[0]) / "packaged/ATen/native/native_functions.yaml"
    entries: list[_Entry] = []
    in_dispatch = False
    for line in path.read_text().splitlines():
        if line.startswith("- func: "):
            entries.append(_Entry(line[8:].split("(", 1)[0]))
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if indent == 2 and ":" in text:
            in_dispatch = text == "dispatch:"
            if text.startswith("structured_delegate:"):
                entries[-1].delegate = text.split(":", 1)[1].strip()
            entries[-1].has_ufunc |= text == "ufunc_inner_loop:"
        elif in_dispatch and indent == 4 and ":" in text and not text.startswith("#"):
            keys = {key.strip() for key in text.split(":", 1)[0].split(",")}
            entries[-1].shared.update(n for n in ("Sparse", "NestedTensor") if {f"{n}CPU", f"{n}CUDA"} <= keys)
            if "CompositeExplicitAutograd" not in keys:  # listed beside CUDA, the composite is CUDA's own code
                entries[-1].keys.update(keys)
    return entries


def native_library(torch_root: Path) -> Path:
    """Return the path of the native library for this torch, building it on first use."""
    digest = hashlib.sha256()
    for path in (*sorted(SOURCES.iterdir()), SHARED, torch_root / "version.py"):
        digest.update(path.read_bytes())
    digest.update(f"{torch_root} {sys.version} {platform.machine()}".encode())
    target = cache_folder() / f"tonnage-{digest.hexdigest()[:20]}.so"
    return built_once(target, lambda: _build(torch_root, target))


def _build(torch_root: Path, target: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise MissingPart(
            "The virtual GPU has a small native half that must be compiled once, and no C++ compiler was found.",
            hint="Install g++ (Debian: apt install g++) or set CXX to a C++20 compiler.",
        )
    print("tonnage: building the virtual GPU for this torch (once, half a minute) ...", file=sys.stderr, flush=True)
    include, libraries = torch_root / "include", torch_root / "lib"
    flags = ["-std=c++20", "-O1", "-fPIC", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    flags += [f"-I{sysconfig.get_paths()['include']}"]
    linked = [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]

    def run(commands: dict[str, list[str]]) -> None:
        """Run the compiler, each command on a core of its own."""
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with ThreadPoolExecutor() as pool:
            jobs = pool.map(lambda command: subprocess.run(command, **pipes), commands.values())
        for what, job in zip(commands, jobs, strict=True):
            if job.returncode:
                raise MissingPart(
                    f"The virtual GPU's native half did not compile ({what}):\n{job.stdout[-2000:]}",
                    hint="It needs a C++20 compiler (g++ 11 or newer), Python's headers and a CPU build of torch 2.11 or "
                    "later.",
                )

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # Two halves: reading torch's headers takes most of the time, and a gigabyte.
        halves = [Path(scratch) / f"{name}.cpp" for name in ("one", "other")]
        for half, units in zip(halves, (UNITS[::2], UNITS[1::2]), strict=True):
            half.write_text("".join(f'#include "{unit}"\n' for unit in units))
        objects = [str(half.with_suffix(".o")) for half in halves]
        run({h.name: [compiler, *flags, "-c", str(h), "-o", made] for h, made in zip(halves, objects, strict=True)})
        built = Path(scratch) / target.name
        run({"link": [compiler, "-shared", "-o", str(built), *objects, *linked]})
        make_safe(built)
        built.replace(target)
