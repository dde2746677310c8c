import io
import time

import pytest

from tonnage.explain.text import explain_text, text_lines

MESSAGE = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} (GPU 0; 23.69 GiB total capacity; 20.00 GiB "
    "already allocated; 5.00 MiB free; 21.00 GiB reserved in total by PyTorch)"
)


def test_the_last_episode_counts_and_its_first_message() -> None:
    quiet = ["step done"] * 400
    lines = [
        MESSAGE.format(asked="1.00 GiB"),
        *quiet,
        MESSAGE.format(asked="2.00 GiB"),
        "[rank1]: " + MESSAGE.format(asked="3.00 GiB"),
    ]
    found = explain_text(lines)
    assert found.numbers and found.numbers.asked == 2 * 2**30
    assert found.episode.count == 2 and found.episode.first_line == 402


def test_a_log_of_megabytes_is_read_in_seconds() -> None:
    line = "2026-01-01 12:00:00 INFO [core.py:12] step {} loss 0.123 memory usage 1234 exit code 0\n"
    log = "".join(line.format(step) for step in range(120_000)) + MESSAGE.format(asked="1.00 GiB") + "\n"
    started = time.process_time()
    found = explain_text(text_lines(io.BytesIO(log.encode())))
    assert found.numbers and len(log) > 10_000_000
    assert time.process_time() - started < 15


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_windows_writes_texts_in_encodings_of_its_own(encoding: str) -> None:
    data = ("начало\r\n" + MESSAGE.format(asked="1.00 GiB") + "\r\n").encode(encoding)
    assert explain_text(text_lines(io.BytesIO(data))).numbers


def test_a_message_in_a_box_or_broken_over_lines_is_one() -> None:
    words = MESSAGE.format(asked="1.00 GiB").split()
    boxed = [f"│ {' '.join(words[at : at + 7]):<70} │" for at in range(0, len(words), 7)]
    assert explain_text(boxed).numbers == explain_text([MESSAGE.format(asked="1.00 GiB")]).numbers


def test_a_line_without_an_end_is_read_in_pieces() -> None:
    data = b"x" * 3_000_000 + b" " + MESSAGE.format(asked="1.00 GiB").encode()
    assert max(map(len, text_lines(io.BytesIO(data)))) < 40_000
    assert explain_text(text_lines(io.BytesIO(data))).first


def test_a_traceback_in_one_line_of_a_log_is_read_as_one() -> None:
    trace = r'Traceback (most recent call last):\n  File "train.py", line 7, in main\n    loss.backward()\n'
    found = explain_text(['{"level": "error", "exc": "' + trace + MESSAGE.format(asked="1.00 GiB") + '"}'])
    assert found.place.phase == "backward" and found.place.own_frame and found.place.own_frame.line == 7
