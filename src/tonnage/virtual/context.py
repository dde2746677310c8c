"""`with tonnage.virtual_gpu("h200") as gpu:` — a virtual GPU for notebooks and tests."""

from types import TracebackType

from tonnage.hardware import Gpu, find_cuda_gpu
from tonnage.ledger import Ledger
from tonnage.recording import Recording
from tonnage.virtual.builds import new_session
from tonnage.virtual.session import Session


class VirtualGpu:
    """A card that is available inside the `with` block, and statistics of its memory."""

    def __init__(self, gpu: str | Gpu, *, torch: str | None = None) -> None:
        self.gpu = find_cuda_gpu(gpu) if isinstance(gpu, str) else gpu
        self._torch = torch
        self._session: Session | None = None

    def __enter__(self) -> "VirtualGpu":
        self._session = new_session(self.gpu, self._torch)
        self._session.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session
        self._session.close()

    @property
    def _entered(self) -> Session:
        if self._session is None:
            raise RuntimeError("Enter the virtual GPU first: with tonnage.virtual_gpu(...) as gpu: ...")
        return self._session

    @property
    def recording(self) -> Recording:
        """Everything recorded so far; each access gives an up-to-date recording."""
        self._entered.device.attribution.finish()
        return self._entered.recording()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that tensors hold now."""
        return self._entered.device.memory_stats()["allocated_bytes.all.current"]

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes that tensors held at once."""
        return self._entered.device.memory_stats()["allocated_bytes.all.peak"]

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the allocator reserved."""
        return self._entered.device.memory_stats()["reserved_bytes.all.peak"]

    def ledger(self) -> Ledger:
        """Return the bytes by category at the peak."""
        return self.recording.ledger()


def virtual_gpu(gpu: str | Gpu, *, torch: str | None = None) -> VirtualGpu:
    """Return a context manager in which `cuda` is the named card; `torch` is the version whose kernels are modelled."""
    return VirtualGpu(gpu, torch=torch)
