"""Find distinct rows of numbers, so that a search over thousands of launches computes each distinct one once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def distinct(columns: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first index of each distinct row of these columns, and the distinct row of every row."""
    arrays = [array for array in map(np.asarray, columns) if array.ndim]
    number = np.zeros(max((array.size for array in arrays), default=1), dtype=np.int64)
    first = np.zeros(1, dtype=np.int64)
    for array in arrays:
        # Combine the codes so far with the values of one more column.
        _, codes = _numbered(array)
        first, number = _numbered(number * array.size + codes)
    return first, number


def _numbered(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first index of each value, and which one every entry is: `np.unique` without its imports."""
    order = np.argsort(values, kind="stable")
    begins = np.ones(values.size, dtype=bool)
    begins[1:] = values[order][1:] != values[order][:-1]
    places = np.empty(values.size, dtype=np.int64)
    places[order] = np.cumsum(begins) - 1
    return order[begins], places
