"""Loads the native library and registers our kernels on the CUDA key, once per process.

The library must be loaded before torch first asks for CUDA's hooks, so it is loaded before `import torch` if
possible.
"""

import ctypes
import importlib.util
import sys
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.errors import NotModelled
from tonnage.garbage import no_collection
from tonnage.virtual.build import native_library
from tonnage.virtual.driver.loading import torch_root

# Implemented in the native library.
NATIVE = frozenset(
    "empty.memory_format empty_strided resize_ copy_ _local_scalar_dense native_dropout record_stream set_ "
    "set_.source_Storage set_.source_Tensor set_.source_Storage_storage_offset".split()
)
# The first do not fill large host tensors, and the second leave results of unfilled tensors unfilled.
HOST_FILLS = "normal_ uniform_ exponential_ log_normal_ cauchy_ bernoulli_.float".split()
HOST_DERIVES = (
    "add.Tensor add_.Tensor sub.Tensor sub_.Tensor mul.Tensor mul_.Tensor div.Tensor div_.Tensor clamp clamp_ "
    "clamp_min clamp_min_ erfinv erfinv_ cat stack linalg_qr sign triu tril sqrt sqrt_ rsqrt exp pow.Tensor_Scalar neg"
).split()

# Nested tensors: CUDA has its own kernels for these, which allocate what the host's code does.
NESTED_LIKE_HOST = ("bmm", "to_padded_tensor", "_nested_tensor_softmax_with_shape")


@cache
def load() -> ctypes.PyDLL:
    """Load the native library and register every kernel."""
    root = torch_root()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(root / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.PyDLL(str(native_library(root)), mode=ctypes.RTLD_GLOBAL)
    _declare(library)
    if "torch" not in sys.modules:
        library.tonnage_keep_shape_rules()
    with no_collection():
        _register(library)
    return library


def _declare(library: ctypes.PyDLL) -> None:
    library.tonnage_current_stream.restype = ctypes.c_int64
    library.tonnage_new_stream.restype = ctypes.c_int64
    library.tonnage_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.tonnage_valueless_count.restype = ctypes.c_uint64
    library.tonnage_is_known.argtypes = [ctypes.c_void_p]
    library.tonnage_is_known.restype = ctypes.c_bool
    library.tonnage_forget.argtypes = [ctypes.c_void_p]
    library.tonnage_forget.restype = None
    library.tonnage_law.argtypes = [ctypes.c_void_p]
    library.tonnage_law.restype = ctypes.c_int32
    library.tonnage_set_cudnn_version.argtypes = [ctypes.c_int64]
    for name in ("start", "listen"):
        getattr(library, f"tonnage_{name}").restype = None


def _register(library: ctypes.PyDLL) -> None:
    import torch  # after the library, see above

    from tonnage.virtual import kernels
    from tonnage.virtual.kernels import registry

    kernels.load_all()
    names = [name for name in cuda_operators() if name not in NATIVE]
    computed = [name for name in names if name not in registry.KERNELS]
    libraries = _lines(f"aten::{n} {lib}" for n, lib in kernels.LIBRARIES.items())
    library.tonnage_set_libraries(libraries, b"")
    library.tonnage_register(_lines(computed), _lines({*names, *registry.KERNELS} - set(registry.SCHEMAS)))
    library.tonnage_register_fallback()
    nested = [*shared_operators("NestedTensor"), *NESTED_LIKE_HOST]
    library.tonnage_register_layouts(_lines(shared_operators("Sparse")), _lines(nested))
    library.tonnage_register_host(_lines(HOST_FILLS), _lines(HOST_DERIVES))
    _register_python(torch)


def _lines(names: Any) -> bytes:
    return "\n".join(n for n in names if not n.startswith("tonnage::")).encode()


_libraries: list[Any] = []  # a torch.library.Library unregisters when it dies


def _register_python(torch: Any) -> None:
    from tonnage.virtual.kernels import registry

    own = torch.library.Library("tonnage", "DEF")
    aten = torch.library.Library("aten", "IMPL")
    _libraries.extend((own, aten))
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
    _refuse_other_layouts(torch)


def _refuse_other_layouts(torch: Any) -> None:
    """Make other operators on sparse and nested tensors raise NotModelled."""
    everything = torch.library.Library("_", "IMPL")
    _libraries.append(everything)

    def refuse(operator: Any, *_: Any, **__: Any) -> None:
        from tonnage.virtual.session import active

        active().stand_ins.unmodelled(str(operator), "not modelled for sparse and nested tensors")
        raise NotModelled(
            f"The virtual GPU does not model {operator} for sparse and nested tensors, and the script calls it on one.",
            hint="For a virtual run make the tensor dense (`to_dense()`), or its layout torch.jagged.",
        )

    for key in ("SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA"):
        everything.fallback(refuse, key)


# Operators with their own CUDA kernel, read from the list that ships with torch: in a build without CUDA they would
# fall through to composites that the card never runs, so each gets a kernel of ours on the CUDA key.


@dataclass
class _Entry:
    name: str
    keys: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)  # layouts whose code is the same for host and CUDA
    delegate: str = ""
    has_ufunc: bool = False

    def runs_on_cuda(self) -> bool:
        return "CUDA" in self.keys or self.has_ufunc


def cuda_operators() -> list[str]:
    """Return the names ("add.Tensor") of all operators with their own CUDA kernel, in the list's order."""
    entries = {entry.name: entry for entry in _operators()}
    return [e.name for e in entries.values() if e.runs_on_cuda() or (e.delegate and entries[e.delegate].runs_on_cuda())]


def shared_operators(layout: str) -> list[str]:
    """Return operators on "Sparse" or "NestedTensor" tensors whose code is the same for host and CUDA."""
    return [entry.name for entry in _operators() if layout in entry.shared]


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
