"""Imports that the virtual GPU watches."""

from pathlib import Path

from virtual_runs import run_tonnage


def test_a_part_of_the_compiler_can_be_imported_first(tmp_path: Path) -> None:
    script = tmp_path / "imports_dynamo.py"
    script.write_text(
        "from torch._dynamo.convert_frame import ConvertFrame\n"
        "import sys, torch\n"
        "assert torch._dynamo.convert_frame is sys.modules['torch._dynamo.convert_frame']\n"
        "assert torch._dynamo.convert_frame.ConvertFrame is ConvertFrame\n"
        "print('imported')\n"
    )
    done = run_tonnage("run", "--gpu", "h200", str(script))
    assert "imported" in done.stdout, done.stderr[-1500:]
