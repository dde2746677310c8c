"""Chooses the virtual GPU that fits the installed torch: a CUDA build gets the empty driver, a CPU build our own device."""

from tonnage.hardware import Gpu
from tonnage.virtual.driver import loading as driver
from tonnage.virtual.session import Session


def new_session(gpu: Gpu, torch_version: str | None = None, cards: int = 1) -> Session:
    """A virtual GPU that is not open yet. `torch_version` names the version whose kernels are modelled, where they are."""
    if driver.is_cuda_build(driver.torch_root()):
        from tonnage.virtual.driver.session import DriverSession

        return DriverSession(gpu, torch_version, cards)
    from tonnage.virtual.modelled import ModelledSession

    return ModelledSession(gpu, torch_version, cards)


def preload() -> None:
    """Load torch with what takes CUDA's place, so that forks of this process have both."""
    if driver.is_cuda_build(driver.torch_root()):
        driver.load(driver.installed_cuda())
        import torch  # noqa: F401
    else:
        from tonnage.virtual.loading import load

        load()
