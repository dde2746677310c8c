"""Layouts of structures, read from a C compiler's debug information."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("readelf")), reason="needs a C compiler and binutils"
)


def load_tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "check_cuda_layouts.py"
    spec = importlib.util.spec_from_file_location("check_cuda_layouts", path)
    assert spec and spec.loader
    module = sys.modules["check_cuda_layouts"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()

THEIRS = """
typedef enum { KIND } Kind;
struct place { Kind kind; int id; };
typedef struct task_st {
  char name[3][4];
  struct place where;
  union { long as_long; double as_double; };
  struct opaque *next;
} task_t;
"""


def test_layout_names_every_member(tmp_path: Path) -> None:
    size, members = tool.layouts(THEIRS, [])["task_t"]
    assert size == 40
    assert [(m.name, m.offset, m.size_bytes) for m in members] == [
        ("name", 0, 12),
        ("where", 12, 8),
        ("where.kind", 12, 4),
        ("where.id", 16, 4),
        ("as_long", 24, 8),
        ("as_double", 24, 8),
        ("next", 32, 8),
    ]


def test_our_own_copy_may_leave_members_out(capsys: pytest.CaptureFixture[str]) -> None:
    ours = tool.layouts("struct task { char name[12]; int where[2]; char reserved[20]; };", [])
    assert tool.compare(ours, tool.layouts(THEIRS, []), "13") == 0
    assert "1 structures compared with CUDA 13, 0 differences" in capsys.readouterr().out


def test_difference_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    ours = tool.layouts("struct task { char name[8]; int where[2]; };\nstruct mine { int x; };", [])
    assert tool.compare(ours, tool.layouts(THEIRS, []), "13") == 1
    assert capsys.readouterr().out.splitlines() == [
        "task: 16 bytes; NVIDIA has 40",
        "task.name is at 0, 8 bytes; NVIDIA has it at 0, 12 bytes",
        "task.where is at 8, 8 bytes; NVIDIA has it at 12, 8 bytes",
        "mine: NVIDIA has no such structure",
        "1 structures compared with CUDA 13, 3 differences",
    ]
