"""What is known of each architecture, as data: the defaults of its fields and its tensors.

`data/architectures.jsonl` holds one architecture per line, and only the requested line is parsed.
`tools/learn_shapes.py` makes the file from transformers itself.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data" / "architectures.jsonl"


@cache
def architecture(model_type: str) -> Mapping[str, Any] | None:
    """Return the row of an architecture; None if unknown."""
    text = _text()
    start = text.find(f'\n{{"model_type": {json.dumps(model_type)}, '.encode())
    if start < 0:
        return None
    row: dict[str, Any] = json.loads(text[start : text.find(b"\n", start + 1)])
    return row


@cache
def _text() -> bytes:
    return b"\n" + _DATA.read_bytes()
