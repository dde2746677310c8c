"""Whatever a recording holds, it is explained, and what is promised is within what was there."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support import MIB, Run
from tonnage.allocator import OutOfMemory
from tonnage.explain import diagnose
from tonnage.ledger import Category
from tonnage.recording import Recording

MOVES = st.tuples(
    st.sampled_from(["alloc", "free", "phase", "step"]),
    st.integers(1, 96 * MIB),
    st.sampled_from(list(Category)[:8]),
    st.sampled_from(["forward", "backward", "optimizer", "other"]),
    st.sampled_from(["", "a.py:1", "a.py:7", "b.py:3"]),
)


def lived(moves: list[tuple[str, int, Category, str, str]]) -> Recording:
    run = Run(capacity_bytes=512 * MIB)
    live, step = [], 0
    try:
        for move, size, category, phase, line in moves:
            if move == "alloc":
                live.append(run.alloc(size, category, line=line, stack=(line,) if line else ()))
            elif move == "free" and live:
                run.free(live.pop(size % len(live)))
            elif move == "phase":
                run.phase(phase)
            elif move == "step":
                step += 1
                run.step(step)
    except OutOfMemory as error:
        return run.dies(error, line="a.py:7")
    return run.recording


@settings(max_examples=150)
@given(st.lists(MOVES, max_size=60))
def test_any_recording_is_explained(moves: list[tuple[str, int, Category, str, str]]) -> None:
    recording = lived(moves)
    diagnosis = diagnose(recording)
    assert diagnosis.sentence.endswith(".")
    assert (diagnosis.cause == "none") <= (recording.oom is None)
    most = recording.peak_reserved_bytes + (recording.oom.requested_bytes if recording.oom else 0)
    assert all(0 <= fix.saves_bytes <= most for fix in diagnosis.fixes)
    assert len({fix.how for fix in diagnosis.fixes}) == len(diagnosis.fixes)
