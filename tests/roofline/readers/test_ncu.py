from pathlib import Path

import pytest

from tonnage.errors import BadProfile
from tonnage.hardware import find_gpu
from tonnage.roofline import Analysis, Bound, analyse, catalogue_ceilings, read_profile
from tonnage.roofline.analysis import RooflineRow
from tonnage.roofline.readers.ncu import read_ncu

FILE = Path(__file__).parents[1] / "data" / "ncu.csv.gz"
HEADING = '"ID","Kernel Name","Block Size","Grid Size"'


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    profile = read_profile(FILE)
    return analyse(profile, catalogue_ceilings(find_gpu(profile.gpu)))


def row(analysis: Analysis, name: str, calls: int = 2) -> RooflineRow:
    return next(row for row in analysis.rows if name in row.item.kernels[0] and row.item.calls == calls)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("nvjet", Bound.COMPUTE),
        ("CUDAFunctorOnSelf_add", Bound.MEMORY),
        ("reduce_kernel", Bound.MEMORY),
        ("layer_norm", Bound.MEMORY),
        ("MulFunctor", Bound.LATENCY),
    ],
)
def test_kernels_of_an_h200(analysis: Analysis, name: str, bound: Bound) -> None:
    assert row(analysis, name).verdict.bound is bound


def test_the_card_is_the_file_s(analysis: Analysis) -> None:
    assert analysis.profile.gpu == "NVIDIA H200" and analysis.profile.kind == "nsight-compute"


def test_counters_are_summed_over_launches(analysis: Analysis) -> None:
    product = row(analysis, "nvjet")
    assert product.seconds == pytest.approx(1_365_792e-9 + 1_367_904e-9)
    assert product.item.work.moved_bytes == 1_384_229_120 + 1_382_332_416
    assert product.verdict.memory_share == pytest.approx(0.21, abs=0.005)
    assert product.verdict.compute_share == pytest.approx(0.932, abs=0.001)


def test_a_grid_of_one_block_is_not_one_of_many(analysis: Analysis) -> None:
    blocks = {row.item.blocks for row in analysis.rows if "distribution" in row.item.kernels[0]}
    assert blocks == {1, 1056}


def test_it_says_that_operations_were_not_counted(analysis: Analysis) -> None:
    assert all(row.item.work.operations is None for row in analysis.rows)
    assert "counts no operations" in analysis.profile.notes[0]


def wide(*counters: tuple[str, str, str]) -> list[str]:
    names, units, values = (",".join(f'"{cell}"' for cell in cells) for cells in zip(*counters, strict=True))
    return [f"{HEADING},{names}\n", f'"","","","",{units}\n', f'"0","gemm","(128, 1, 1)","(64, 2, 1)",{values}\n']


def test_counted_operations_and_units() -> None:
    (item,) = read_ncu(
        wide(
            ("gpu__time_duration.sum", "us", "1,000.5"),
            ("dram__bytes_read.sum", "Mbyte", "3"),
            ("dram__bytes_write.sum", "Kbyte", "1,000"),
            ("sm__ops_path_tensor_src_bf16_dst_fp32.sum", "", "5,000,000"),
            ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", "inst", "10"),
            ("smsp__sass_thread_inst_executed_op_fadd_pred_on.sum", "inst", "n/a"),
        ),
        "a file",
    ).items
    assert item.seconds == pytest.approx(1000.5e-6)
    assert (item.work.operations, item.work.moved_bytes, item.work.precision) == (5e6, 4e6, "bf16")
    assert item.blocks == 128


def test_operations_a_cycle_and_bytes_a_second() -> None:
    (item,) = read_ncu(
        wide(
            ("gpu__time_duration.sum", "ns", "1,000"),
            ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum.per_cycle_elapsed", "inst/cycle", "100"),
            ("smsp__cycles_elapsed.avg", "cycle", "1,500"),
            ("dram__bytes.sum.per_second", "Gbyte/s", "2"),
        ),
        "a file",
    ).items
    assert item.work.operations == 2 * 100 * 1500 and item.work.precision == "fp32"
    assert item.work.moved_bytes == pytest.approx(2000)


def test_the_details_page() -> None:
    heading = '"ID","Process ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"\n'
    values = [
        ("Duration", "us", "500"),
        ("DRAM Throughput", "%", "85.5"),
        ("Compute (SM) Throughput", "%", "10"),
        ("Memory Throughput", "%", "86"),
    ]
    rows = [f'"0","1","add","(128, 1, 1)","(9, 1, 1)","{name}","{unit}","{value}"\n' for name, unit, value in values]
    (item,) = read_ncu([heading, *rows], "a file").items
    assert (item.seconds, item.dram_share, item.sm_share) == (
        pytest.approx(5e-4),
        pytest.approx(0.855),
        pytest.approx(0.1),
    )
    rate = '"0","1","add","(128, 1, 1)","(9, 1, 1)","Memory Throughput","Gbyte/s","4,000"\n'
    (item,) = read_ncu([heading, *rows, rate], "a file").items
    assert item.work.moved_bytes == pytest.approx(2e9) and item.on_chip_share == pytest.approx(0.86)


def test_lines_around_the_table_are_skipped() -> None:
    lines = ["==PROF== Connected\n", "epoch 1, loss 2.0\n", *wide(("gpu__time_duration.sum", "ns", "5")), "done\n"]
    assert len(read_ncu(lines, "a file").items) == 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no table of kernels"),
        (["==PROF== Connected\n"], "no table of kernels"),
        ([f"{HEADING}\n"], "no kernel with a duration"),
        (wide(("dram__bytes.sum", "byte", "5")), "no kernel with a duration"),
        (wide(("gpu__time_duration.sum", "ns", "-5")), "no kernel with a duration"),
        (wide(("gpu__time_duration.sum", "ns", "inf")), "no kernel with a duration"),
        ([f"{HEADING}\n", '"' + "x" * 200_000], "not CSV"),
    ],
)
def test_files_that_say_too_little(lines: list[str], words: str) -> None:
    with pytest.raises(BadProfile, match=words) as caught:
        read_ncu(lines, "a file")
    assert caught.value.hint
