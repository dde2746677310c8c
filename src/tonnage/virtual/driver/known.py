"""Known and assumed values of tensors on the virtual card, by the address of their storage.

Small integer tensors, masks and scalars have a copy of their storage on the host; for others a law may be kept
(`laws`).
"""

from dataclasses import dataclass
from typing import Any

from tonnage.script.attribution import address_of
from tonnage.virtual.driver.device import DriverDevice

# Values of larger tensors are not kept.
MOST_INTEGERS = 1 << 22
MOST_FLOATS = 1 << 20


@dataclass(slots=True)
class _Mirror:
    """The bytes of a storage on the card, kept on the host, as of one tensor version."""

    storage: Any
    version: int


class KnownValues:
    """The storages of one card whose values are known or follow a law."""

    def __init__(self, device: DriverDevice, torch: Any) -> None:
        self._device = device
        self._torch = torch
        # Use torch's originals: libraries may replace the public functions (DeepSpeed ZeRO 3 does).
        self._plain = torch._C._VariableFunctions
        self._mirrors: dict[int, _Mirror] = {}
        self._laws: dict[int, int] = {}
        self._guessed: set[int] = set()  # addresses of storages whose known values were assumed

    def is_known(self, tensor: Any) -> bool:
        return self._mirror(tensor) is not None

    def forget(self, tensor: Any) -> None:
        self.dropped(address_of(tensor))

    def dropped(self, address: int) -> None:
        """Drop the values at an address that was freed or overwritten."""
        self._mirrors.pop(address, None)
        self._laws.pop(address, None)
        self._guessed.discard(address)

    def is_guessed(self, *tensors: Any) -> bool:
        """Whether known values of one of these tensors were assumed, or computed from such values."""
        return bool(self._guessed) and any(t.is_cuda and address_of(t) in self._guessed for t in tensors)

    def host_view(self, tensor: Any) -> Any:
        """Return the values of a known tensor, on the host."""
        mirror = self._mirror(tensor)
        assert mirror is not None
        empty = self._plain.empty(0, dtype=tensor.dtype)
        return empty.set_(mirror.storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def put(self, tensor: Any, values: Any, fresh: bool = False, guess: bool = False) -> None:
        """Set the values of the tensor. A `fresh` one's storage holds nothing else, and may be larger.

        A `guess` was assumed, or computed from what was.
        """
        if not self._may_be_known(tensor) or not tensor.is_cuda:
            return
        self._device.drain()  # log entries may concern earlier blocks at these addresses
        address = address_of(tensor)
        mirror = self._mirror(tensor)
        if mirror is None:
            if not fresh and not self._is_whole(tensor):
                return  # part of an unknown storage
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            elements = tensor.storage_offset() + last + 1 if tensor.numel() else 0
            mirror = _Mirror(self._torch.UntypedStorage(elements * tensor.element_size()), 0)
        mirror.version = version_of(tensor)
        self._mirrors[address] = mirror
        self._laws.pop(address, None)
        if guess:
            self._guessed.add(address)
        elif self._guessed and (fresh or self._is_whole(tensor)):
            self._guessed.discard(address)
        self.host_view(tensor).copy_(values.reshape(tensor.shape) if values.shape != tensor.shape else values)

    def _is_whole(self, tensor: Any) -> bool:
        """Whether the tensor spans its storage, without asking for its size (see `address_of`)."""
        try:
            self._plain.as_strided(tensor, (tensor.numel() + 1,), (1,), 0)
        except RuntimeError:  # one more element is out of bounds
            return True
        return False

    def _may_be_known(self, tensor: Any) -> bool:
        limit = MOST_FLOATS if tensor.dtype.is_floating_point else MOST_INTEGERS
        if tensor.layout is not self._torch.strided or tensor.is_complex():
            return False
        return bool(tensor.numel() <= limit or without_repeats(tensor).numel() <= limit)

    def _mirror(self, tensor: Any) -> _Mirror | None:
        if not self._mirrors or not tensor.is_cuda or not self._may_be_known(tensor):
            return None
        address = address_of(tensor)
        if address not in self._mirrors:
            return None
        self._device.drain()  # the address may have been freed and reused
        mirror = self._mirrors.get(address)
        if mirror is None:
            return None
        # A tracked in-place operator increments the version after the wrapper, so one version more means the same
        # values.
        if version_of(tensor) - mirror.version > 1:
            del self._mirrors[address]
            return None
        return mirror

    def _on_host(self, tensor: Any) -> Any:
        return self.host_view(tensor) if tensor.is_cuda else tensor

    def _law_number(self, tensor: Any) -> int:
        """Return the number of the tensor's law; 0 if it has none."""
        if not self._laws or not tensor.is_cuda or address_of(tensor) not in self._laws:
            return 0
        self._device.drain()
        return self._laws.get(address_of(tensor), 0)

    def _keep_law(self, tensor: Any, number: int) -> None:
        if number:
            self._device.drain()  # log entries may concern earlier blocks at this address
            self._laws[address_of(tensor)] = number


def without_repeats(tensor: Any) -> Any:
    """Narrow an expanded tensor so that each element in memory occurs once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def version_of(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:  # inference tensors have no version counter
        return 0
