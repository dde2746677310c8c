from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nvml_fake import GIB
from tonnage.hardware.nvml import GpuMemory, ProcessMemory
from tonnage.report.runs.watch import footer, frame, moment_figures, plain_lines, sparkline
from tonnage.watch import GpuSample, WatchHistory


def busy_machine(used_gib: float = 92.41, processes: int = 2) -> GpuSample:
    names = ["python a_long_name_of_a_training_script.py", *["python"] * processes]
    found = tuple(ProcessMemory(1000 + i, names[i], int((40 - i) * GIB)) for i in range(processes))
    return GpuSample(86_400.0, (GpuMemory(0, "NVIDIA H200", "GPU-1", 140 * GIB, int(used_gib * GIB), 0, 98, found),))


def watched(*moments: GpuSample) -> str:
    history = WatchHistory()
    for moment in moments:
        history.add(moment)
    return "\n".join([*(line.plain for line in (*frame(history), *footer(history, 1.0, "")))])


@given(values=st.lists(st.integers(0, 2**40), max_size=100), full=st.integers(0, 2**40), cells=st.integers(1, 50))
def test_a_sparkline_has_a_cell_a_value(values: list[int], full: int, cells: int) -> None:
    assert len(sparkline(values, full, cells)) == min(len(values), cells)


def test_a_sparkline_s_height_is_the_card() -> None:
    assert sparkline([0, 1, 50, 100, 120], 100, 10) == "▁▂▅██"


def test_a_frame_says_what_is_used_by_whom() -> None:
    text = watched(busy_machine(10.0), busy_machine())
    assert "GPU 0  NVIDIA H200" in text
    assert "92.41 of 140.00 GiB  66 %" in text
    assert "peak 92.41 GiB   98 % busy" in text
    assert "1001  python" in text
    assert "40.00 GiB" in text
    assert "outside these processes" in text
    assert "13.41 GiB" in text
    assert "left" not in text


def test_a_frame_is_at_home_in_80_columns() -> None:
    (gpu,) = busy_machine(139.99, processes=20).gpus
    named = replace(gpu, name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", busy_percent=100)
    text = watched(*[GpuSample(86_400.0, (named,))] * 200)
    assert max(map(len, text.splitlines())) <= 80
    assert "and 12 smaller ones" in text


def test_little_left_is_said_with_who_holds_it() -> None:
    text = watched(busy_machine(138.0))
    assert "GPU 0 has 2.00 GiB left" in text
    assert "(1000) holds most" in text
    assert "none of it is a process seen from here" in watched(busy_machine(138.0, processes=0))


def test_an_unknown_share_is_not_zero() -> None:
    gpu = GpuMemory(0, "card", "GPU-1", 140 * GIB, GIB, 0, None, (ProcessMemory(7, "?", None),))
    text = watched(GpuSample(0.0, (gpu,)))
    assert "unknown" in text
    assert "busy" not in text


def test_lines_for_a_log() -> None:
    (line,) = plain_lines(busy_machine(processes=1))
    assert "GPU 0  92.41 of 140.00 GiB  66 %   98 % busy" in line
    assert line.endswith("a_long_name_of_a_training_script.py (1000) 40.00 GiB")


def test_figures_carry_their_unit() -> None:
    figures = moment_figures(busy_machine())
    (gpu,) = figures["gpus"]
    assert figures["time_s"] == 86_400.0
    assert gpu["used_bytes"] == int(92.41 * GIB)
    assert gpu["unseen_bytes"] == gpu["used_bytes"] - 79 * GIB
    assert gpu["processes"][0] == {
        "pid": 1000,
        "name": "python a_long_name_of_a_training_script.py",
        "used_bytes": 40 * GIB,
    }


def test_before_the_first_sample_there_is_nothing_to_show() -> None:
    assert list(frame(WatchHistory())) == []
