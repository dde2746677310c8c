import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import BadProfile
from tonnage.hardware import find_gpu
from tonnage.report.roofline import roofline_figures, roofline_lines
from tonnage.report.roofline_page import roofline_page
from tonnage.roofline import analyse, catalogue_ceilings, read_profile
from tonnage.roofline.readers.ncu import read_ncu
from tonnage.roofline.readers.torch_trace import read_torch_trace

DATA = Path(__file__).parents[1] / "data"
CEILINGS = catalogue_ceilings(find_gpu("h200"))


@pytest.mark.parametrize(("name", "kind"), [("ncu.csv.gz", "nsight-compute"), ("step.json.gz", "torch-profiler")])
def test_contents_say_what_a_file_is(tmp_path: Path, name: str, kind: str) -> None:
    plain = tmp_path / "renamed.txt"
    plain.write_bytes(gzip.decompress((DATA / name).read_bytes()))
    assert read_profile(DATA / name).kind == read_profile(plain).kind == kind
    assert read_profile(DATA / name).items == read_profile(plain).items


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "neither JSON nor"),
        (b"hello", "neither JSON nor"),
        (b"\x80\x04\x95cos\nsystem\n", "neither JSON nor"),
        (b"{}", "no trace of the PyTorch profiler"),
        (b"3", "no trace of the PyTorch profiler"),
        (b'{"traceEvents": [', "neither JSON nor"),
        (b"[" * 200_000, "neither JSON nor"),
        (b"[]", "no trace of the PyTorch profiler"),
        (gzip.compress(b"hello")[:-6], "damaged"),
        (b"\x1f\x8bnothing", "damaged"),
        (gzip.compress(b"hello" * 999).replace(b"\x08", b"\x09", 1), "damaged"),
        (gzip.compress(b"x" * 5000), "more than"),
    ],
)
def test_other_files_get_a_line_of_words(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "profile"
    path.write_bytes(data)
    limit = 1000 if words == "more than" else 2**20
    with pytest.raises(BadProfile, match=words) as caught:
        read_profile(path, limit_bytes=limit)
    assert caught.value.hint and "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="cannot be read: No such file"):
        read_profile(tmp_path / "none.json")


def test_a_trace_that_names_a_kernel_is_not_taken_for_ncu_s(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    kernel = {"ph": "X", "cat": "kernel", "name": "Kernel Name", "ts": 0, "dur": 1}
    path.write_text(json.dumps({"traceEvents": [kernel]}))
    assert read_profile(path).kind == "torch-profiler"


numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -1, True]))
odd = st.recursive(
    st.one_of(st.none(), numbers, st.text(max_size=5)), lambda inner: st.lists(inner, max_size=4), max_leaves=6
)
events = st.fixed_dictionaries(
    {"ph": st.just("X")},
    optional={
        "cat": st.sampled_from(["kernel", "cpu_op", "gpu_memcpy", "gpu_memset", "cuda_runtime"]),
        "name": st.sampled_from(["aten::mm", "aten::add_", "aten::sum", "aten::cat", "Memcpy HtoD", "aten::_softmax"]),
        "ts": st.one_of(st.floats(0, 1e9), odd),
        "dur": st.one_of(st.floats(0, 1e9), odd),
        "args": st.one_of(
            odd,
            st.fixed_dictionaries(
                {"External id": st.one_of(st.integers(0, 2), odd)},
                optional={
                    "Input Dims": odd,
                    "Input type": st.one_of(odd, st.lists(st.sampled_from(["float", "TensorList"]))),
                    "Input Strides": odd,
                    "Concrete Inputs": odd,
                    "bytes": odd,
                    "grid": odd,
                    "device": odd,
                    "correlation": odd,
                    "kernel_num_gb": odd,
                    "kernel_flop": odd,
                },
            ),
        ),
    },
)


@given(st.lists(events, max_size=6), odd)
def test_any_trace_is_read_or_refused(found: list[dict[str, object]], devices: object) -> None:
    trace = {"traceEvents": found, "deviceProperties": devices}
    try:
        profile = read_torch_trace(trace, "a trace")
    except BadProfile:
        return
    analysis = analyse(profile, CEILINGS)
    assert "\n".join(map(str, roofline_lines(analysis)))
    assert roofline_page(analysis)
    json.dumps(roofline_figures(analysis), allow_nan=False)


cells = st.text(st.sampled_from('0123456789.,-einf"% (×byteKMG'), max_size=12)


@given(st.lists(st.lists(cells, min_size=8, max_size=8), max_size=5), st.text(max_size=20))
def test_any_table_is_read_or_refused(rows: list[list[str]], before: str) -> None:
    heading = "ID,Kernel Name,Grid Size,Block Size,gpu__time_duration.sum,dram__bytes.sum,sm__throughput.avg.pct,x"
    lines = [before, heading, *(",".join(row) for row in rows)]
    try:
        profile = read_ncu([line + "\n" for line in lines], "a table")
    except BadProfile:
        return
    assert "\n".join(map(str, roofline_lines(analyse(profile, CEILINGS))))
