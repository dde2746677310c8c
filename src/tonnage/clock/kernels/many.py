"""Rows of numbers that are alike, so that what a search asks of thousands of launches is computed once for each that differs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def distinct(columns: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each distinct row comes first, and which of them every row is. Columns are numbers or arrays of one length."""
    arrays = [np.asarray(column) for column in columns]
    size = max(array.size for array in arrays)
    number = np.zeros(size, dtype=np.int64)
    for array in arrays:
        if array.ndim:
            values, codes = np.unique(array, return_inverse=True)
            number = number * len(values) + codes.reshape(-1)
    _, first, places = np.unique(number, return_index=True, return_inverse=True)
    return first, places.reshape(-1)
