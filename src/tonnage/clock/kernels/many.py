"""Rows of numbers that are alike, so that what a search asks of thousands of launches is computed once for each that differs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def distinct(columns: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each distinct row comes first, and which of them every row is. Columns are numbers or arrays of one length."""
    arrays = [array for array in map(np.asarray, columns) if array.ndim]
    number = np.zeros(max((array.size for array in arrays), default=1), dtype=np.int64)
    first = np.zeros(1, dtype=np.int64)
    for array in arrays:
        # The rows so far, each with the values of one more column.
        _, codes = _numbered(array)
        first, number = _numbered(number * array.size + codes)
    return first, number


def _numbered(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each value comes first, and which of them every one is: `np.unique`, without the modules that it loads."""
    order = np.argsort(values, kind="stable")
    begins = np.ones(values.size, dtype=bool)
    begins[1:] = values[order][1:] != values[order][:-1]
    places = np.empty(values.size, dtype=np.int64)
    places[order] = np.cumsum(begins) - 1
    return order[begins], places
