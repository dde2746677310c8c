"""The pytest gate on a real GPU: a test within its limit passes, one beyond it fails with its ledger."""

from pathlib import Path

import pytest

import tonnage

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")]
pytest_plugins = "pytester"

TESTS = """
import pytest, torch

@pytest.mark.gpu_memory(limit="1 GiB")
def test_fits():
    torch.zeros(2**20, device="cuda").sum().item()

@pytest.mark.gpu_memory(limit="1 MiB")
def test_too_much():
    model = torch.nn.Linear(4096, 4096).cuda()
    model(torch.randn(256, 4096, device="cuda")).sum().backward()
"""


def test_a_limit_holds_on_the_gpu_that_is_there(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(tonnage.__file__).parents[1]))  # it may run from source, not installed
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:tonnage", "-p", "tonnage.integrations.pytest_plugin")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*1.00 MiB*"])
