"""Real inner runs of pytest, each in a process of its own, as a project would have them."""

import pytest

from tonnage.virtual.cache import cache_folder

pytest_plugins = ["pytester"]
CACHE = cache_folder()  # inner runs have a home of their own, in which the virtual GPU would be built again


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(CACHE))


NET = """
import pytest
import torch
from torch import nn


@pytest.fixture
def net():
    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(2)]
    return nn.Sequential(*layers).cuda()


def train(net, batch):
    inputs = torch.randn(batch, 1024, device="cuda")
    net(inputs).square().mean().backward()
"""


def run(pytester: pytest.Pytester, text: str, *words: str) -> pytest.RunResult:
    pytester.makepyfile(test_memory=NET + text)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *words, timeout=240)


def test_within_the_limit_it_passes_and_past_it_it_fails_with_where_it_went(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.mark.gpu_memory(limit="2 GiB")
def test_small(net):
    train(net, 64)

@pytest.mark.gpu_memory(limit="1 GiB")
def test_large(net):
    train(net, 16384)

def test_afterwards_there_is_no_card_and_numbers_are_numbers():
    assert not torch.cuda.is_available()
    assert torch.randn(1024, 1024).std() > 0.5
""",
    )
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(
        [
            "GPU memory: needed 1.7* GiB, limit 1.00 GiB: 0.7* GiB too much",
            "  peak in backward at test_memory.py:14  net(inputs).square().mean().backward()",
            "  on NVIDIA H200, 139.80 GiB, virtual",
            "  activations * GiB *",
            "  parameters * GiB *",
            "  largest at the peak",
            "*0.50 GiB 2 × float32 [[]16384, 4096[]]*test_memory.py:14",
            "  to save memory: half the batch: saves * GiB, costs twice the steps*",
            '  if it is meant to need this much: limit="1.* GiB"',
        ]
    )
    done.stdout.no_fnmatch_line("*Traceback*")


def test_a_card_that_is_too_small_keeps_the_test_s_own_error(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
@pytest.mark.gpu_memory("1 GiB", card="t4")
def test_oom(net):
    train(net, 2**19)

@pytest.mark.gpu_memory("1 GiB", card="t4")
def test_value(net):
    out = net(torch.randn(4, 1024, device="cuda"))
    assert torch.isfinite(out).all() and (out < 1e3).all()
    value = out.mean().item()
    assert value < 0.5
""",
    )
    done.assert_outcomes(failed=2)
    done.stdout.fnmatch_lines(
        [
            "It depends on values that a prediction does not have: the assertion at test_memory.py:25 fails*",
            "*number=0*",
        ]
    )
    done.stdout.fnmatch_lines(
        ["E * torch.OutOfMemoryError: CUDA out of memory*", "GPU memory: needed at least * GiB, *"]
    )
    done.stdout.fnmatch_lines(["  out of memory in forward at test_memory.py:14*", "  on Tesla T4, 14.76 GiB, virtual"])


def test_the_option_holds_every_test_that_has_no_mark(pytester: pytest.Pytester) -> None:
    text = """
def test_unmarked(net):
    train(net, 4096)

@pytest.mark.gpu_memory(limit="4 GiB")
def test_marked(net):
    train(net, 4096)
"""
    done = run(pytester, text, "--gpu-memory-fail-above", "256MiB", "--gpu-memory-card", "l4", "--junit-xml", "out.xml")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["GPU memory: needed *, limit 0.25 GiB*", "  on NVIDIA L4,*"])
    assert 'name="gpu_memory_bytes"' in (pytester.path / "out.xml").read_text()


def test_a_card_that_is_there_is_measured(pytester: pytest.Pytester) -> None:
    """A virtual card that stays open for the whole run stands in for it: to the plugin it is the machine's own."""
    pytester.makeconftest(
        """
import tonnage

card = tonnage.virtual_gpu("h100")

def pytest_sessionstart():
    card.__enter__()

def pytest_sessionfinish():
    card.__exit__(None, None, None)
"""
    )
    text = """
left_behind = []

@pytest.mark.gpu_memory(limit="64 MiB")
def test_large(net):
    left_behind.append(net)
    train(net, 4096)

@pytest.mark.gpu_memory(limit="16 MiB")
def test_what_was_there_before_does_not_count():
    torch.zeros(2**20, device="cuda")
"""
    done = run(pytester, text)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(
        ["GPU memory: needed * MiB, limit 64.00 MiB*", "  peak in backward*", "  on NVIDIA H100*measured"]
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu-memory-fail-above", "2 GBB"], "*'2 GBB' is not a size in bytes.*"),
        (["--gpu-memory-fail-above", "2GiB", "--gpu-memory-card", "h2000"], "*h2000*"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_at_once(
    pytester: pytest.Pytester, words: list[str], says: str
) -> None:
    done = run(pytester, "def test_nothing(): pass", *words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([says])


def test_a_mark_that_makes_no_sense_is_that_test_s_error(pytester: pytest.Pytester) -> None:
    done = run(pytester, '@pytest.mark.gpu_memory(limit="2 GBB")\ndef test_it(): pass\n\ndef test_other(): pass\n')
    done.assert_outcomes(passed=1, errors=1)
    done.stdout.fnmatch_lines(["gpu_memory: '2 GBB' is not a size in bytes.", "Write it like*"])


WRITTEN_WRONGLY = {
    "": "gpu_memory: @pytest.mark.gpu_memory() has no limit.",
    "()": "gpu_memory: @pytest.mark.gpu_memory() has no limit.",
    '(card="t4")': "gpu_memory: @pytest.mark.gpu_memory(card='t4') has no limit.",
    '(max="1 GiB")': "gpu_memory: @pytest.mark.gpu_memory(max='1 GiB') has max=, which the mark does not take.",
    '("1 GiB", "t4")': "gpu_memory: @pytest.mark.gpu_memory('1 GiB', 't4') has 2 limits; the card is given by name.",
    '("1 GiB", limit="2 GiB")': "gpu_memory: @pytest.mark.gpu_memory('1 GiB', limit='2 GiB') has 2 limits; *",
    "(limit=None)": "gpu_memory: @pytest.mark.gpu_memory(limit=None) has a limit that is neither a size nor *",
    "(limit=1.5)": "gpu_memory: @pytest.mark.gpu_memory(limit=1.5) has a limit that is neither a size nor *",
    '("1 GiB", card=4)': "gpu_memory: @pytest.mark.gpu_memory('1 GiB', card=4) has a card that is no name.",
    '("1 GiB", card="t5")': "gpu_memory: *'t5'*",
    '("-1 GiB")': "gpu_memory: '-1 GiB' is not a size in bytes.",
}


def test_a_mark_that_is_written_wrongly_says_how_to_write_it(pytester: pytest.Pytester) -> None:
    tests = [
        f"@pytest.mark.gpu_memory{arguments}\ndef test_{number}(): pass\n"
        for number, arguments in enumerate(WRITTEN_WRONGLY)
    ]
    pytester.makepyfile("import pytest\n\n" + "\n".join(tests))
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly")
    done.assert_outcomes(errors=len(WRITTEN_WRONGLY))
    done.stdout.fnmatch_lines([words.replace("[", "[[]") for words in WRITTEN_WRONGLY.values()])
    done.stdout.fnmatch_lines(['Write it like @pytest.mark.gpu_memory(limit="2 GiB", card="t4").'])
    done.stdout.no_fnmatch_line("*Traceback*")
    done.stdout.no_fnmatch_line("*TypeError*")


def test_where_it_is_not_used_nothing_is_loaded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import sys

def test_nothing_is_loaded():
    loaded = {name.split(".")[0] for name in sys.modules}
    assert not loaded & {"torch", "numpy", "rich", "typer"}
    ours = {name for name in sys.modules if name.startswith("tonnage")}
    assert ours == {"tonnage", "tonnage.integrations", "tonnage.integrations.pytest_plugin"}
"""
    )
    done = pytester.runpytest_subprocess("--strict-markers", "-p", "no:cov", "-p", "no:hypothesispytest", timeout=60)
    done.assert_outcomes(passed=1)
