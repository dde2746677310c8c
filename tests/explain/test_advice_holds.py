"""What the advice promises, held against virtual runs of the example after the change was made."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from virtual_runs import run_tonnage

EXAMPLE = (Path(__file__).parents[2] / "examples" / "train_gpt.py").read_text()
SHAPE = ["--batch", "8", "--layers", "6", "--dim", "512", "--heads", "8"]

CHECKPOINTED = EXAMPLE.replace(
    "x = layer(x)", "x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)"
).replace("import torch\n", "import torch.utils.checkpoint\n", 1)
CHUNKED = EXAMPLE.replace("return self.lm_head(self.norm(x))", "return self.norm(x)").replace(
    "loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())",
    """chunks = zip(logits.flatten(0, 1).chunk(8), targets.flatten().chunk(8))
            part = lambda hidden, target: F.cross_entropy(model.lm_head(hidden), target)
            loss = sum(torch.utils.checkpoint.checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks) / 8""",
)
CHUNKED = CHUNKED.replace("import torch\n", "import torch.utils.checkpoint\n", 1)
HALVED = ["--batch", "4", *SHAPE[2:]]


@cache
def figures(source: str, *words: str) -> dict:
    with TemporaryDirectory() as scratch:
        script, answer = Path(scratch) / "train_gpt.py", Path(scratch) / "answer.json"
        script.write_text(source)
        done = run_tonnage("run", "--gpu", "h200", "--json", str(answer), str(script), *words)
        assert done.returncode == 0, done.stderr
        return json.loads(answer.read_text())


@pytest.mark.parametrize(
    ("change", "source", "words"),
    [
        ("half the batch", EXAMPLE, HALVED),
        ("recompute 6 blocks", CHECKPOINTED, SHAPE),
        ("chunked loss", CHUNKED, SHAPE),
    ],
)
def test_a_change_saves_what_was_promised(change: str, source: str, words: list[str]) -> None:
    before, after = figures(EXAMPLE, *SHAPE), figures(source, *words)
    promised = next(fix["saves_bytes"] for fix in before["fixes"] if fix["change"] == change)
    saved = before["peak_allocated_bytes"] - after["peak_allocated_bytes"]
    assert promised == pytest.approx(saved, rel=0.1)
