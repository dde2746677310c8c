"""Answers to the stand-in libraries, against figures measured on an H200 with torch 2.11 (CUDA 13.0, cuDNN 9.19)."""

from types import SimpleNamespace
from typing import Any

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.cuda.releases import release_of
from tonnage.virtual.driver.session import NONE, answer

H200: Any = SimpleNamespace(gpu=find_gpu("h200"), release=release_of((2, 11)))
STEM = "w=64,3,7,7 ws=147,49,7,1 y=8,64,112,112 ys=802816,12544,112,1 padding=3,3 stride=2,2 dilation=1,1"


def ask(question: str) -> int:
    return answer(question, H200)


@pytest.mark.parametrize(
    ("question", "size"),
    [
        ("solver routine=potrf rows=512 columns=512 reflectors=0 batch=1 item_bytes=4", 1152),
        ("solver routine=getrf rows=100 columns=100 reflectors=0 batch=1 item_bytes=4", 2304),
        ("solver routine=geqrf rows=512 columns=512 reflectors=0 batch=1 item_bytes=4", 4194432),
        ("solver routine=orgqr rows=1000 columns=200 reflectors=200 batch=1 item_bytes=4", 783360),
        ("solver routine=orgqr rows=64 columns=64 reflectors=64 batch=1 item_bytes=8", 296960),
        ("solver routine=ormqr rows=100 columns=5 reflectors=100 batch=1 item_bytes=4", 455936),
        ("solver routine=gesvdj rows=32 columns=32 reflectors=0 batch=64 item_bytes=4", 3968),
        ("solver routine=gesvdj rows=100 columns=100 reflectors=0 batch=1 item_bytes=4", 117632),
        ("solver routine=gesvdj rows=30 columns=100 reflectors=0 batch=1 item_bytes=4", 3158016),
        ("solver routine=syevj rows=200 columns=200 reflectors=0 batch=1 item_bytes=4", 194380),
        ("fourier batch=6 input_bytes=4 output_bytes=8 real=1 signal=2000", 48000),
        ("fourier batch=16 input_bytes=8 output_bytes=8 real=0 signal=32000", 4096000),
        ("batch_norm pass=forward dtype=float32 x=4,16,7,9 xs=1008,63,9,1", 0),
        ("recurrent what=weights mode=2 input=33 hidden=17 layers=1 directions=1 projected=0 dtype=float32", 14144),
        ("recurrent what=reserve mode=2 input=33 hidden=17 layers=1 directions=1 projected=0 dtype=float32 training=1 "
         "dropout=0 steps=30 batch=4 rows=0", 41056),
        ("dropout_states", 132 * 2048 * 24),
        ("attention pass=backward dtype=bfloat16 q=2,8,256,64 summed_bytes=1048576 engine=0", 1048832),
        ("version library=cudnn", 91900), ("version library=cuda", 13000),
    ],
)  # fmt: skip
def test_measured_sizes(question: str, size: int) -> None:
    assert ask(question) == size


@pytest.mark.parametrize(("n", "size"), [(3, 271816), (1500, 36893996)])
def test_eigenvalues_by_divide_and_conquer_are_within_a_percent(n: int, size: int) -> None:
    found = ask(f"solver routine=syevd rows={n} columns={n} reflectors=0 batch=1 item_bytes=4")
    assert found == pytest.approx(size, rel=0.01)


def test_a_convolution_has_the_measured_engine_first_and_others_after_it() -> None:
    question = f"convolution way=forward dtype=float32 compute=float32 x=8,3,224,224 xs=150528,50176,224,1 {STEM}"
    assert ask(f"{question} engine=0") == 30544656
    assert ask(f"{question} engine=1") > 0
    assert ask(f"{question} engine=9") == NONE


def test_an_unmeasured_convolution_is_told() -> None:
    told: list[str] = []
    question = (
        "convolution way=forward dtype=float32 compute=float32 x=1,7,31,29 xs=6293,899,29,1 w=11,7,3,5 ws=105,15,5,1 "
        "y=1,11,29,25 ys=7975,725,25,1 padding=0,0 stride=1,1 dilation=1,1 engine=0"
    )
    answer(question, H200, lambda operator, words: told.append(operator))
    assert told == ["cudnn_convolution"]


def test_strides_tell_the_layout() -> None:
    layer = "x=32,256,14,14 xs={} w=256,256,3,3 ws={} padding=1,1 stride=1,1 dilation=1,1 engine=0"
    question = f"convolution way=backward_filter dtype=float32 compute=float32 {layer}"
    assert ask(question.format("50176,196,14,1", "2304,9,3,1")) == 22282847
    assert ask(question.format("50176,1,3584,256", "2304,1,768,256")) == 7078479


def test_a_single_channel_leaves_the_layout_to_the_next_operand() -> None:
    as_last = "x=2,1,4,4 xs=16,1,4,1"
    assert ask(f"batch_norm pass=forward dtype=float32 {as_last}") > 0
    assert ask("batch_norm pass=forward dtype=float32 x=2,1,4,4 xs=16,16,4,1") == 0


@pytest.mark.parametrize(
    "question", ["nothing at=all", "sparse routine=spmm algorithm=0 elements=5", "version library=curand"]
)
def test_what_is_not_known_has_no_answer(question: str) -> None:
    assert ask(question) == NONE
