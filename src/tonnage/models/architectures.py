"""What is known of each architecture, as data: the defaults of its fields and its tensors.

`data/architectures.jsonl` holds one architecture a line; only the line that is asked for is parsed. The file is made by
`tools/learn_shapes.py` from transformers itself.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data" / "architectures.jsonl"


@cache
def architecture(model_type: str) -> Mapping[str, Any] | None:
    """The row of an architecture; None where it is not known."""
    text = _text()
    start = text.find(f'\n{{"model_type": {json.dumps(model_type)}, '.encode())
    if start < 0:
        return None
    row: dict[str, Any] = json.loads(text[start : text.find(b"\n", start + 1)])
    return row


@cache
def _text() -> bytes:
    return b"\n" + _DATA.read_bytes()
