"""The stand-ins for cuDNN, cuFFT, cuSOLVER and cuSPARSE, called as a C program would call them."""

import ctypes
import shutil
from collections.abc import Callable, Iterator
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_longlong, c_size_t, c_void_p
from typing import Any

import pytest

from tonnage.virtual.driver.build import CORE, libraries, library_folder

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
Load = Callable[[str], Any]
INT64, FLOAT, BOOLEAN, DESCRIPTOR = 3, 4, 2, 15  # cudnnBackendAttributeType_t


class Asked:
    """Answers every question with a number that a test has set, and keeps the questions."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.reply: Callable[[str], int] = lambda question: 1000

    def __call__(self, question: bytes) -> int:
        self.questions.append(question.decode())
        return self.reply(question.decode())


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def load(asked: Asked) -> Iterator[Load]:
    """Load a library of CUDA 13 by its name; its questions come to `asked`."""
    folder = library_folder(13)
    core = ctypes.CDLL(str(folder / CORE))
    callback = ctypes.CFUNCTYPE(c_longlong, ctypes.c_char_p)(asked)
    core.tn_answer_with(callback)
    yield lambda name: ctypes.CDLL(str(folder / next(each.soname for each in libraries(13) if each.name == name)))
    core.tn_answer_with(None)


# cuDNN's graph API


class Graphs:
    """Descriptors of cuDNN by their numbers."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def make(self, type: int) -> c_void_p:
        made = c_void_p()
        assert self.library.cudnnBackendCreateDescriptor(type, byref(made)) == 0
        return made

    def set(self, descriptor: c_void_p, name: int, type: int, *values: Any) -> None:
        kinds: dict[int, Any] = {INT64: c_int64, BOOLEAN: ctypes.c_bool, DESCRIPTOR: c_void_p, FLOAT: c_float}
        array = (kinds.get(type, c_int) * len(values))(*values)
        assert self.library.cudnnBackendSetAttribute(descriptor, name, type, c_int64(len(values)), array) == 0

    def finalize(self, descriptor: c_void_p) -> int:
        return int(self.library.cudnnBackendFinalize(descriptor))

    def number(self, descriptor: c_void_p, name: int) -> int:
        value = c_int64()
        assert self.library.cudnnBackendGetAttribute(descriptor, name, INT64, c_int64(1), None, byref(value)) == 0
        return value.value

    def tensor(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: int = 0, virtual: bool = False
    ) -> c_void_p:
        made = self.make(17)
        self.set(made, 901, 1, dtype)
        self.set(made, 902, INT64, *shape)
        self.set(made, 903, INT64, *strides)
        self.set(made, 906, INT64, id(made) % 10**9)
        self.set(made, 907, BOOLEAN, virtual)
        assert self.finalize(made) == 0
        return made

    def graph(self, *operations: c_void_p) -> c_void_p:
        made = self.make(15)
        self.set(made, 801, DESCRIPTOR, *operations)
        return made

    def configs(self, graph: c_void_p, mode: int = 0) -> list[c_void_p]:
        """The engine configurations that the heuristic offers."""
        heuristic = self.make(4)
        self.set(heuristic, 201, DESCRIPTOR, graph)
        self.set(heuristic, 200, 8, mode)
        assert self.finalize(heuristic) == 0
        count = c_int64()
        ask = self.library.cudnnBackendGetAttribute
        assert ask(heuristic, 202, DESCRIPTOR, c_int64(0), byref(count), None) == 0
        made = [self.make(3) for _ in range(count.value)]
        array = (c_void_p * len(made))(*made)
        assert ask(heuristic, 202, DESCRIPTOR, c_int64(len(made)), byref(count), array) == 0
        self.library.cudnnBackendDestroyDescriptor(heuristic)
        return made

    def plan(self, config: c_void_p) -> c_void_p:
        made = self.make(5)
        self.set(made, 401, DESCRIPTOR, config)
        assert self.finalize(made) == 0
        return made


def _convolution(graphs: Graphs) -> c_void_p:
    how = graphs.make(1)
    graphs.set(how, 100, 1, 0)
    for name, values in ((102, (1, 1)), (103, (2, 2)), (104, (3, 3)), (105, (3, 3))):
        graphs.set(how, name, INT64, *values)
    operation = graphs.make(10)
    graphs.set(operation, 702, DESCRIPTOR, how)
    graphs.set(operation, 703, DESCRIPTOR, graphs.tensor((64, 3, 7, 7), (147, 49, 7, 1), dtype=9))
    graphs.set(operation, 704, DESCRIPTOR, graphs.tensor((8, 3, 224, 224), (150528, 50176, 224, 1), dtype=9))
    graphs.set(operation, 705, DESCRIPTOR, graphs.tensor((8, 64, 112, 112), (802816, 12544, 112, 1), dtype=9))
    return operation


def test_a_plan_of_a_convolution_has_the_workspace_that_python_answers(load: Load, asked: Asked) -> None:
    asked.reply = lambda question: {"engine=0": 4096, "engine=1": 512}.get(question.split()[-1], -1)
    graphs = Graphs(load("cudnn"))
    graph = graphs.graph(_convolution(graphs))
    assert graphs.finalize(graph) == 0
    configs = graphs.configs(graph)
    graphs.library.cudnnBackendDestroyDescriptor(graph)  # PyTorch drops it before it makes a plan
    assert [graphs.number(graphs.plan(config), 402) for config in configs] == [4096, 512]
    assert asked.questions[0] == (
        "convolution way=forward dtype=bfloat16 compute=float32 x=8,3,224,224 xs=150528,50176,224,1 w=64,3,7,7 "
        "ws=147,49,7,1 y=8,64,112,112 ys=802816,12544,112,1 padding=3,3 stride=2,2 dilation=1,1 engine=0"
    )


def test_the_fallback_needs_no_workspace(load: Load) -> None:
    graphs = Graphs(load("cudnn"))
    graph = graphs.graph(_convolution(graphs))
    (config,) = graphs.configs(graph, mode=2)
    assert graphs.number(graphs.plan(config), 402) == 0


def test_a_plan_tells_its_engine_and_no_notes(load: Load) -> None:
    graphs = Graphs(load("cudnn"))
    config = graphs.configs(graphs.graph(_convolution(graphs)))[0]
    engine, count = graphs.make(2), c_int64(-1)
    read = graphs.library.cudnnBackendGetAttribute
    assert read(config, 300, DESCRIPTOR, c_int64(1), byref(count), byref(engine)) == 0
    assert graphs.number(engine, 1301) == 1
    assert read(engine, 1303, 11, c_int64(9), byref(count), None) == 0
    assert count.value == 0


def _product(graphs: Graphs, a: c_void_p, b: c_void_p, c: c_void_p) -> c_void_p:
    made = graphs.make(19)
    for name, tensor in ((1520, a), (1521, b), (1522, c)):
        graphs.set(made, name, DESCRIPTOR, tensor)
    return made


def test_two_products_are_attention(load: Load, asked: Asked) -> None:
    graphs = Graphs(load("cudnn"))
    q, v, out = (graphs.tensor((2, 8, 256, 64), (131072, 16384, 64, 1), dtype=9) for _ in range(3))
    keys = graphs.tensor((2, 8, 64, 256), (131072, 16384, 1, 64), dtype=9)
    scores = graphs.tensor((2, 8, 256, 256), (524288, 65536, 256, 1), virtual=True)
    graph = graphs.graph(_product(graphs, q, keys, scores), _product(graphs, scores, v, out))
    assert graphs.finalize(graph) == 0
    assert graphs.configs(graph)
    assert asked.questions[0].startswith("attention pass=forward dtype=bfloat16 q=2,8,256,64 ")
    assert " v=2,8,256,64 " in asked.questions[0]


def test_another_graph_is_refused(load: Load, asked: Asked) -> None:
    graphs = Graphs(load("cudnn"))
    assert graphs.finalize(graphs.graph(graphs.make(29))) == 3001, "a norm"
    assert not asked.questions


# cuDNN's recurrent networks


def test_weights_of_a_recurrent_network_lie_one_after_another(load: Load) -> None:
    """As PyTorch checks: matrices of the gates side by side, nothing twice, nothing beyond the buffer."""
    library = load("cudnn")
    network, dropout, matrix, bias = c_void_p(), c_void_p(), c_void_p(), c_void_p()
    library.cudnnCreateRNNDescriptor(byref(network))
    library.cudnnCreateDropoutDescriptor(byref(dropout))
    library.cudnnCreateTensorDescriptor(byref(matrix))
    library.cudnnCreateTensorDescriptor(byref(bias))
    sizes = (c_int32(5), c_int32(7), c_int32(0), c_int32(2))  # input, hidden, projected, layers
    assert library.cudnnSetRNNDescriptor_v8(network, 0, 2, 3, 1, 0, 0, 0, 0, *sizes, dropout, 0) == 0
    total = 2 * 4 * (7 * (5 + 7) + 7 * (14 + 7)) + 2 * 2 * 8 * 7
    ends, base = [], 1 << 40
    for place in range(4):
        for linear in range(8):
            at, bias_at = c_void_p(), c_void_p()
            arguments = (None, network, place, c_size_t(4 * total), c_void_p(base), linear)
            assert library.cudnnGetRNNWeightParams(*arguments, matrix, byref(at), bias, byref(bias_at)) == 0
            assert at.value and bias_at.value
            ends += [(at.value - base, _elements(library, matrix)), (bias_at.value - base, _elements(library, bias))]
    ends.sort()
    assert [start for start, _ in ends] == [sum(4 * count for _, count in ends[:i]) for i in range(len(ends))]
    assert ends[-1][0] + 4 * ends[-1][1] == 4 * total


def _elements(library: Any, tensor: c_void_p) -> int:
    dtype, dims, sizes, strides = c_int(), c_int(), (c_int * 3)(), (c_int * 3)()
    assert library.cudnnGetTensorNdDescriptor(tensor, 3, byref(dtype), byref(dims), sizes, strides) == 0
    assert dims.value == 3
    return sizes[0] * sizes[1] * sizes[2]


def test_the_space_of_a_packed_batch_is_asked_by_its_rows(load: Load, asked: Asked) -> None:
    library = load("cudnn")
    network, dropout, x = c_void_p(), c_void_p(), c_void_p()
    library.cudnnCreateRNNDescriptor(byref(network))
    library.cudnnCreateDropoutDescriptor(byref(dropout))
    library.cudnnCreateRNNDataDescriptor(byref(x))
    library.cudnnSetDropoutDescriptor(dropout, None, c_float(0.5), None, c_size_t(0), ctypes.c_ulonglong(0))
    library.cudnnSetRNNDescriptor_v8(network, 0, 3, 3, 0, 0, 2, 0, 0, 8, 16, 0, 2, dropout, 0)
    library.cudnnSetRNNDataDescriptor(x, 2, 1, 4, 3, 8, (c_int * 3)(4, 2, 1), None)
    work, reserve = c_size_t(), c_size_t()
    assert library.cudnnGetRNNTempSpaceSizes(None, network, 1, x, byref(work), byref(reserve)) == 0
    assert (work.value, reserve.value) == (1000, 1000)
    assert asked.questions[0] == (
        "recurrent what=workspace mode=3 input=8 hidden=16 layers=2 directions=1 projected=0 dtype=float16 training=1 "
        "dropout=1 steps=4 batch=3 rows=7"
    )


def test_batch_norm_asks_with_the_strides(load: Load, asked: Asked) -> None:
    library = load("cudnn")
    x, size = c_void_p(), c_size_t()
    library.cudnnCreateTensorDescriptor(byref(x))
    library.cudnnSetTensorNdDescriptor(x, 2, 4, (c_int * 4)(4, 64, 8, 8), (c_int * 4)(4096, 1, 512, 64))
    library.cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(None, 2, 0, x, None, x, None, None, byref(size))
    library.cudnnGetBatchNormalizationBackwardExWorkspaceSize(None, 2, 0, x, None, x, None, x, None, None, byref(size))
    shape = "dtype=float16 x=4,64,8,8 xs=4096,1,512,64"
    assert asked.questions == [f"batch_norm pass=forward {shape}", f"batch_norm pass=backward {shape}"]


# The others


def test_a_plan_of_cufft(load: Load, asked: Asked) -> None:
    library = load("cufft")
    plan, size, real, complex_ = c_int(), c_size_t(), 0, 4
    assert library.cufftCreate(byref(plan)) == 0
    signal = (c_longlong * 2)(32, 62)
    layout = (None, c_longlong(1), c_longlong(1))
    arguments = (plan, 2, signal, *layout, complex_, *layout, real, c_longlong(6), byref(size), complex_)
    assert library.cufftXtMakePlanMany(*arguments) == 0
    assert size.value == 1000
    assert asked.questions == ["fourier batch=6 input_bytes=8 output_bytes=4 real=1 signal=32,62"]
    assert library.cufftSetAutoAllocation(plan, 1) == 16, "it would have to allocate"


def test_cusolver_counts_elements_and_bytes(load: Load, asked: Asked) -> None:
    library = load("cusolver")
    elements, device, host = c_int(), c_size_t(), c_size_t(7)
    assert library.cusolverDnDgetrf_bufferSize(None, 30, 20, None, 30, byref(elements)) == 0
    assert elements.value == 125, "of eight bytes"
    wide = (c_int64(30), 0, None, c_int64(30))
    assert library.cusolverDnXpotrf_bufferSize(None, None, 0, *wide, 0, byref(device), byref(host)) == 0
    assert (device.value, host.value) == (1000, 0)
    assert asked.questions == [
        "solver routine=getrf rows=30 columns=20 reflectors=0 batch=1 item_bytes=8",
        "solver routine=potrf rows=30 columns=30 reflectors=0 batch=1 item_bytes=4",
    ]


def test_cusolver_without_an_answer_is_not_supported(load: Load, asked: Asked) -> None:
    asked.reply = lambda question: -1
    elements = c_int()
    assert load("cusolver").cusolverDnSgeqrf_bufferSize(None, 3, 3, None, 3, byref(elements)) == 9


def test_cusparse_knows_the_size_of_a_matrix(load: Load, asked: Asked) -> None:
    library = load("cusparse")
    matrix, sizes = c_void_p(), [c_int64() for _ in range(3)]
    shape = (c_int64(33), c_int64(65), c_int64(2145))
    assert library.cusparseCreateCsr(byref(matrix), *shape, None, None, None, 2, 2, 0, 0) == 0
    assert library.cusparseSpMatGetSize(matrix, *map(byref, sizes)) == 0
    assert [size.value for size in sizes] == [33, 65, 2145]
    size = c_size_t()
    assert library.cusparseSpMM_bufferSize(None, 0, 0, None, matrix, None, None, None, 0, 6, byref(size)) == 0
    assert asked.questions == ["sparse routine=spmm algorithm=6 elements=2145"]


@pytest.mark.parametrize(
    ("library", "name", "status"), [("cudnn", "cudnnCTCLoss_v8", 3000), ("cusparse", "cusparseSpMV", 10)]
)
def test_what_has_no_meaning_fails(load: Load, library: str, name: str, status: int) -> None:
    assert getattr(load(library), name)() == status
