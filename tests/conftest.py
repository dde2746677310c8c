"""Garbage collections of a process of tests: few, and not of what was imported. They took a tenth of the tests' time."""

import gc


def pytest_configure() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of torch and transformers
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
