"""Which of PyTorch's operators CUDA implements itself, read from the list that ships with the installed torch.

On a build without CUDA those operators would fall through to composites that the card never runs, so each of them gets
a kernel of ours on the CUDA key. This module only reads the list.
"""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path


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
    """Names with overloads ("add.Tensor") of every operator with a CUDA kernel of its own, in the list's order."""
    entries = {entry.name: entry for entry in _read(_list_path())}
    return [e.name for e in entries.values() if e.runs_on_cuda() or (e.delegate and entries[e.delegate].runs_on_cuda())]


def shared_operators(layout: str) -> list[str]:
    """Operators on "Sparse" or "NestedTensor" tensors whose code is the same for host and CUDA."""
    return [entry.name for entry in _read(_list_path()) if layout in entry.shared]


def _list_path() -> Path:
    spec = importlib.util.find_spec("torchgen")
    assert spec and spec.submodule_search_locations, "torchgen ships with torch"
    return Path(spec.submodule_search_locations[0]) / "packaged/ATen/native/native_functions.yaml"


def _read(path: Path) -> list[_Entry]:
    """The few fields needed, without a YAML parser: the file is regular, and this is thirty times as fast."""
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
