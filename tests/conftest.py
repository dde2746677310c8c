"""Settings of every process of tests: garbage collections, which took a tenth of the time, and those of Hypothesis."""

import gc

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_configure() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of torch and transformers
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
