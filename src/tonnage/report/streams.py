"""Who may write to standard output. It knows nothing of what is written."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def data_on_stdout(wanted: bool) -> Iterator[None]:
    """While the block runs, what anyone prints goes to standard error, so that standard output is data alone."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
