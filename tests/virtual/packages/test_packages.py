"""Stand-ins of packages that are not installed here: what they allocate under both builds of torch, and their words."""

import os
import re
from functools import cache
from pathlib import Path

import pytest

from cuda_build import ROOT, TONNAGE, needs_cuda_build
from virtual_runs import SCRIPTS, run_tonnage

ENGINES = ROOT / ".venv" / "engines"
BUILDS = ["cpu", pytest.param("cuda", marks=needs_cuda_build)]
MIB = 1 << 20
both_builds = pytest.mark.parametrize("build", BUILDS)
# What is asked of a library is asked by the same lines under both.
either_build = pytest.mark.parametrize(
    "build", ["cpu", pytest.param("cuda", marks=[needs_cuda_build, pytest.mark.slow])]
)


@cache
def said(script: str, build: str, folder: Path | None = None) -> tuple[str, str]:
    """The output and the words of a script on a virtual H200; `folder` is for Python to look into."""
    program = {} if build == "cpu" else {"executable": str(TONNAGE)}
    environment = {**os.environ, **({"PYTHONPATH": str(folder)} if folder else {})}
    done = run_tonnage("run", "--gpu", "h200", "-v", str(SCRIPTS / script), env=environment, **program)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return done.stdout, done.stderr


def figures(script: str, build: str) -> dict[str, tuple[int, int]]:
    """By name: the most that was allocated at once, and what was left allocated."""
    rows = re.findall(r"^(\S.*) (-?\d+) (-?\d+)$", said(script, build)[0], re.M)
    return {name: (int(most), int(left)) for name, most, left in rows}


@both_builds
def test_flash_attention_allocates_what_its_source_does(build: str) -> None:
    found = figures("flash_attention.py", build)
    whole, sums, state = 16 * MIB, 8 * 16 * 1024 * 4, 512
    for name in ("dense", "shared", "deterministic", "packed", "keys-packed"):
        assert found[name] == (whole + sums + state,) * 2, name
    accumulator = 8 * 1024 * 16 * 64 * 4
    assert found["dense-backward"][0] == 3 * whole + sums + accumulator
    assert found["shared-backward"][0] == whole + 2 * whole // 4 + sums + accumulator + 2 * whole
    assert found["deterministic-backward"][0] == 3 * whole + sums + 2 * accumulator  # 132 processors, 128 heads
    assert found["packed-backward"][0] == found["keys-packed-backward"][0] == 3 * whole + sums + accumulator
    assert found["padded"] == (4 * 2 * whole + 2 * sums + state,) * 2
    assert found["padded-backward"][0] == 4 * 2 * whole + 2 * sums + 2 * accumulator


@both_builds
def test_sequences_of_many_lengths_have_rows_between_them(build: str) -> None:
    found = figures("flash_attention.py", build)
    whole, sums, state, rows = 8 * MIB, 16 * 4096 * 4, 512, 4096 + 4 * 128
    for name in ("ragged", "ragged-keys-packed", "ragged-packed"):
        assert found[name] == (whole + sums + state,) * 2, name
        assert found[f"{name}-backward"][0] == 3 * whole + 16 * rows * 4 + rows * 16 * 64 * 4, name


@both_builds
def test_a_single_query_splits_its_keys(build: str) -> None:
    found = figures("flash_attention.py", build)
    out, parts = 2 * 16 * 64 * 2, 32 * 2 * 16 * 4  # in 32 runs
    assert found["split"] == (out + 512 + 512 + parts + 64 * parts, out)
    assert found["cache"] == found["split"]


@both_builds
def test_the_other_parts_of_flash_attention(build: str) -> None:
    found, output = figures("flash_attention.py", build), said("flash_attention.py", build)[0]
    assert found["rotary"] == (16 * MIB, 16 * MIB) and found["rotary-backward"][0] == 16 * MIB
    assert found["rms"] == (16 * MIB + 8192 * 4,) * 2
    assert (
        0 <= found["rms-backward"][0] - (16 * MIB + 8 * 132 * 1024 * 4) < 10 * MIB
    )  # torch's sum has scratch of its own
    assert found["loss"] == (3 * 4096 * 4, 2 * 4096 * 4)
    assert "probabilities [(8, 1024, 16, 64), (8, 16, 1024), (8, 16, 1024, 1024)]" in output
    assert "unpadded (8168, 16, 64) 1024 (8, 1024, 16, 64) (5, 16, 64)" in output
    assert "sum kept [(8192, 1024), (8192, 1024)] (8192, 1024)" in output


@both_builds
def test_a_stand_in_refuses_in_words_and_says_that_it_is_one(build: str) -> None:
    output, _ = said("flash_attention.py", build)
    assert "type: flash-attn takes queries, keys and values that are all float16 or all bfloat16, not float32" in output
    assert "device: flash-attn needs tensors on a GPU" in output
    assert "width: flash-attn takes heads of up to 256 elements, and these have 264" in output
    assert "heads: The 16 heads of queries cannot share 3 heads of keys evenly" in output
    assert "ends: flash-attn takes the ends of sequences as int32" in output
    assert "flash_attn is not installed, and its stand-in has no flash_attn.modules" in output
    assert "flash_attn is not installed: a stand-in allocated what flash_attn 2.8.3 does" in " ".join(output.split())


@either_build
def test_transformers_finds_flash_attention_when_it_is_asked_for_it(build: str) -> None:
    output, _ = said("flash_transformer.py", build)
    assert "before False" in output and "after True flash_attention_2" in output
    assert "flash_attn is not installed" in output


@both_builds
def test_xformers_runs_the_operators_of_torch(build: str) -> None:
    found, (output, _) = figures("efficient_attention.py", build), said("efficient_attention.py", build)
    whole, sums, accumulator = 16 * MIB, 8 * 16 * 1024 * 4, 32 * MIB
    assert found["causal"] == (whole + sums + 1024, whole + sums)
    with_zeros = 3 * whole + sums + accumulator + sums  # autograd makes a gradient for the sums, too
    assert found["causal-backward"][0] == found["plain-backward"][0] == with_zeros
    row = 8 * MIB + 16 * 4096 * 4 + 512  # with where the sequences start
    assert found["documents"] == (row + 1024, row)
    assert found["bias-backward"][0] > 16 * whole + 3 * whole  # the bias has a gradient
    assert found["single precision"] == (2 * whole + sums,) * 2
    assert "split [(2, 512, 16, 64), (1, 1024, 16, 64)]" in output
    assert found["norm"] == (32 * MIB, 16 * MIB)  # with its input
    assert "decoded (1, 600, 4, 64)" in output
    assert "norm: xformers has no gradient for this" in output
    assert "groups: xformers has no backward of attention with groups of heads" in output
    assert "types: Queries, keys and values differ in type" in output
    assert "shapes: Queries of shape (8, 1024, 16, 64) do not fit keys of shape (8, 1024, 3, 64)" in output
    assert "lengths: The mask has 5 queries in all, and there are 4096" in output
    assert "xformers is not installed: a stand-in allocated what xformers 0.0.35 does" in " ".join(output.split())


@either_build
@pytest.mark.skipif(not (ENGINES / "deepspeed").exists(), reason="DeepSpeed is not installed (make setup)")
def test_deepspeeds_optimizers_need_no_compiler(build: str) -> None:
    output, _ = said("deepspeed_optimizers.py", build, ENGINES)
    overflow = 512
    assert f"FusedAdam {8 * MIB + overflow}" in output
    assert f"FusedLamb {8 * MIB + 512}" in output  # a coefficient
    assert f"FusedLion {4 * MIB + overflow}" in output
    assert "NotModelled: DeepSpeed compiles its operator quantizer at first use" in output
    for line in ("1 FusedAdam", "2 DeepSpeedCPUAdam", "3 FusedAdam", "3 DeepSpeedCPUAdam"):
        assert f"engine {line}" in output
