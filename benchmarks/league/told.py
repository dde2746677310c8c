"""What a script of the league itself says of its memory: it writes a JSON object of bytes to the file that `--out` names."""

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rows import Prediction, Row
from running import preload, run

SCRIPTS = Path(__file__).parent / "scripts"


def told(row: Row, script: str, words: Sequence[str]) -> Prediction:
    """The bytes of the row's meter, as a run on the row's card tells them."""
    found, error = _ran(script, tuple(words), row.card, row.torch or None)
    if row.meter not in found:
        return Prediction(refused=error or "nothing was told")
    return Prediction(predicted=found[row.meter])


@cache
def _ran(script: str, words: tuple[str, ...], card: str, torch: str | None) -> tuple[dict[str, int], str]:
    preload()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "told.json"
        peaks = run(SCRIPTS / script, [*words, "--out", str(out)], card, torch)
        return (json.loads(out.read_text()) if out.exists() else {}), peaks.error
