"""CUDA graphs and memory pools; the byte counts are those of a real H200."""

import gc
from collections.abc import Iterator

import pytest

from tonnage.hardware import find_gpu
from tonnage.virtual.loading import load
from tonnage.virtual.modelled import ModelledSession as Session

load()
import torch  # noqa: E402


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(find_gpu("h200"), "2.11.0")
    session.open()
    yield session
    session.close()


def held() -> tuple[int, int]:
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_a_capture_allocates_as_on_the_card(session: Session) -> None:
    graph = torch.cuda.CUDAGraph()
    source = torch.ones(2**20, device="cuda")
    assert held() == (4194304, 20971520)
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream().cuda_stream
        double = source * 2
        result = double + 1
        assert held() == (12583936, 44040192)
    assert not torch.cuda.is_current_stream_capturing()
    assert graph.pool() == (1, 0) and torch.cuda.graph_pool_handle() == (0, 1) and torch.cuda.MemPool().id == (0, 2)
    graph.replay()
    segments = [
        (s["segment_pool_id"], s["total_size"], s["stream"], s["allocated_size"]) for s in torch.cuda.memory_snapshot()
    ]
    assert sorted(segments) == sorted(
        [((0, 0), 2097152, stream, 1024), ((0, 0), 20971520, 0, 4194304), ((1, 0), 20971520, stream, 8388608)]
    )
    del double, result
    assert held() == (4195328, 44040192)
    graph.reset()
    torch.cuda.empty_cache()
    assert held() == (4195328, 23068672)
    del graph
    torch.cuda.empty_cache()
    assert held() == (4194304, 20971520)


def test_a_stream_that_joins_a_capture_is_captured_too(session: Session) -> None:
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        with torch.cuda.stream(side):
            before = torch.ones(2**20, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            after = torch.ones(2**20, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
    pools = {s["segment_pool_id"] for s in torch.cuda.memory_snapshot() if s["stream"] == side.cuda_stream}
    assert pools == {(0, 0), graph.pool()} and before.is_cuda and after.is_cuda


def test_graphs_share_a_pool(session: Session) -> None:
    pool = torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            torch.ones(2**20, device="cuda")
    assert [graph.pool() for graph in graphs] == [pool, pool]
    assert [s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == pool] == [20971520]


def test_mistakes_are_told_as_pytorch_tells_them(session: Session) -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with pytest.raises(RuntimeError, match="does not model the nodes of a CUDA graph"):
        graph.debug_dump("graph.dot")


def test_graphed_callables_train(session: Session) -> None:
    model = torch.nn.Linear(64, 64).cuda()
    sample = torch.randn(8, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    graphed(torch.randn(8, 64, device="cuda", requires_grad=True)).sum().backward()
    assert model.weight.grad is not None
    assert any(s["segment_pool_id"] != (0, 0) for s in torch.cuda.memory_snapshot())


def test_a_pool_of_ones_own(session: Session) -> None:
    torch.cuda.init()
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        there = torch.ones(2**20, device="cuda")
        assert pool.use_count() == 2
    here = torch.ones(2**20, device="cuda")
    assert pool.use_count() == 1 and len(pool.snapshot()) == 1 and held() == (2 * 4194304, 2 * 20971520)
    assert pool.snapshot()[0]["segment_pool_id"] == pool.id
    del there, here
    torch.cuda.empty_cache()
    assert held() == (0, 20971520)
    del pool
    gc.collect()
    assert held() == (0, 0)


def test_pools_that_are_not_modelled_say_so(session: Session) -> None:
    torch.cuda.init()
    with pytest.raises(RuntimeError, match="does not model a MemPool"):
        torch.cuda.MemPool(use_on_oom=True)
