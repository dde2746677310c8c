"""The README's example makes a model that loads, answers and has a chat template."""

import runpy
from pathlib import Path

import pytest

import torchvision_names  # noqa: F401
from tonnage.serve.text import Tokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "serve_tiny.py"


def test_it_answers_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(SCRIPT), str(tmp_path / "tiny")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("(length)") + out.count("(stop)") == 3
    assert "blocks × 8.00 KiB" in out and "0 running · 0 waiting" in out
    tokenizer = Tokenizer.load(tmp_path / "tiny")
    assert tokenizer is not None
    text = tokenizer.decode(tokenizer.chat([{"role": "user", "content": "über 🚢"}]), special=True)
    assert text == "<|user|>über 🚢<|end|><|assistant|>"
