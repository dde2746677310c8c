"""What a process holds on the card beside the caching allocator: the context, and each library once it is used."""

from tonnage.hardware import Gpu


class Overheads:
    """The parts in use so far, in bytes, by the catalogue's figures for this card."""

    def __init__(self, gpu: Gpu, torch_version: tuple[int, int]) -> None:
        # Since 1.13 a kernel is loaded when it is first launched; before, all of torch's were.
        all_kernels = {"kernels": gpu.overheads["all kernels"]} if torch_version < (1, 13) else {}
        self._known = {**gpu.overheads, **all_kernels}
        self.parts: dict[str, int] = {}
        self.use("context")

    @property
    def total_bytes(self) -> int:
        """Everything in use so far."""
        return sum(self.parts.values())

    def use(self, library: str, handle: int = 1) -> bool:
        """Count the library (its `handle`-th handle) from now on; true if that changed anything."""
        part = library if handle == 1 else f"{library} {handle}"
        if part in self.parts or library not in self._known:
            return False
        self.parts[part] = self._known[library].size_bytes
        return True
