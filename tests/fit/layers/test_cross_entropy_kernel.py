"""The kernel of the cross-entropy without a GPU, by Triton's interpreter."""

from pathlib import Path

from triton_apart import needs_triton, run_apart

pytestmark = needs_triton


def test_the_kernel_agrees_with_pytorch() -> None:
    run_apart(Path(__file__).parent / "interpreted_cross_entropy.py", TRITON_INTERPRET="1")
