"""Large tensors of the host stay unwritten, and what is drawn after them is what torch draws."""

import ctypes
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_build import needs_cuda_build, run
from tonnage.virtual.driver.build import CORE, library_folder
from virtual_runs import run_tonnage

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
SCRIPTS = Path(__file__).parent / "scripts"
WORDS = 624


class Twister:
    """Python's Mersenne Twister, kept as torch keeps its own: how many numbers are left, which is next, and the words."""

    def __init__(self, seed: int) -> None:
        _, state, _ = random.Random(seed).getstate()
        self.words = (ctypes.c_uint32 * WORDS)(*state[:WORDS])
        self.left, self.next = ctypes.c_int32(1), ctypes.c_uint32(0)
        self.core = ctypes.CDLL(str(library_folder(13) / CORE))

    def pass_over(self, count: int) -> "Twister":
        self.core.tn_pass_over(self.words, ctypes.byref(self.left), ctypes.byref(self.next), ctypes.c_int64(count))
        return self

    def state(self) -> tuple[int, int, tuple[int, ...]]:
        return self.left.value, self.next.value, tuple(self.words)

    def draw(self, count: int) -> list[int]:
        """The numbers that Python draws from the same words."""
        generator = random.Random()
        place = WORDS if self.left.value == 1 else self.next.value
        generator.setstate((3, (*self.words, place), None))
        return [generator.getrandbits(32) for _ in range(count)]


@needs_compiler
@pytest.mark.parametrize("count", [0, 1, 2, 623, 624, 625, 1247, 1248, 10**6 + 7, 4 * 10**6 + 1])
def test_a_generator_that_passed_numbers_draws_those_after_them(count: int) -> None:
    plain = random.Random(7)
    if count:
        plain.getrandbits(32 * count)
    expected = [plain.getrandbits(32) for _ in range(2000)]
    assert Twister(7).pass_over(count).draw(2000) == expected
    assert Twister(7).pass_over(count // 3).pass_over(count - count // 3).draw(2000) == expected


@needs_compiler
@pytest.mark.parametrize("first", [10**12, 3 * 10**11 + 5, 2**39, 25 * 10**5])
def test_two_jumps_are_one(first: int) -> None:
    second = 10**12 + 12345 - first
    whole = Twister(first).pass_over(first + second).state()
    assert Twister(first).pass_over(first).pass_over(second).state() == whole
    assert Twister(first).pass_over(second).pass_over(first).state() == whole


@pytest.fixture(scope="module")
def drawn() -> str:
    """What torch draws without a virtual GPU, after the same modules: that it draws as itself before them needs no proof."""
    command = [sys.executable, SCRIPTS / "draws.py", "modules"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    assert plain.stdout.startswith("drawn ")
    return plain.stdout.strip()


@needs_cuda_build
def test_what_is_drawn_next_is_what_torch_draws(drawn: str, tmp_path: Path) -> None:
    done = run("--gpu", "h200", SCRIPTS / "draws.py", folder=tmp_path)
    assert drawn in done.stdout + done.stderr, done.stderr[-2000:]


def test_a_cpu_build_draws_the_same(drawn: str) -> None:
    done = run_tonnage("run", "--gpu", "h200", str(SCRIPTS / "draws.py"))
    assert drawn in done.stdout + done.stderr, done.stderr[-2000:]


@needs_cuda_build
def test_known_values_decide_sizes_and_pass_through_a_group_of_one(tmp_path: Path) -> None:
    done = run("--gpu", "h200", SCRIPTS / "collects.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
