"""Chooses the virtual GPU for the installed torch: stub CUDA libraries for a CUDA build, our own device for a CPU build."""

from tonnage.hardware import Gpu
from tonnage.virtual.driver import loading as driver
from tonnage.virtual.session import Session


def new_session(gpu: Gpu, torch_version: str | None = None, cards: int = 1) -> Session:
    """Create a virtual GPU that is not open yet. `torch_version` is the version whose kernels are modelled (CPU builds)."""
    if driver.is_cuda_build(driver.torch_root()):
        from tonnage.virtual.driver.session import DriverSession

        return DriverSession(gpu, torch_version, cards)
    from tonnage.virtual.modelled import ModelledSession

    return ModelledSession(gpu, torch_version, cards)


def preload() -> None:
    """Load torch together with its CUDA replacement, so that forked processes inherit both."""
    if driver.is_cuda_build(driver.torch_root()):
        driver.load(driver.installed_cuda())
        import torch  # noqa: F401
    else:
        from tonnage.virtual.loading import load

        load()
