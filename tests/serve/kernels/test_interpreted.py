"""The Triton kernels without a GPU: by Triton's interpreter, and compiled for a card."""

from pathlib import Path

import pytest

from triton_apart import needs_triton, run_apart

HERE = Path(__file__).parent
pytestmark = needs_triton


@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("interpreted_*.py")))
def test_kernels_agree_with_their_plain_versions(name: str) -> None:
    run_apart(HERE / name, TRITON_INTERPRET="1")


def test_kernels_compile_for_a_card(tmp_path: Path) -> None:
    run_apart(HERE / "compiled_kernels.py", TRITON_CACHE_DIR=str(tmp_path))
