"""Known and assumed values of tensors on the virtual card, by the address of their storage.

Small integer tensors, masks and scalars have a copy of their storage on the host; for others a law may be kept
(`laws`).

Torch's own kernels call operators, too, and then write over their results: many begin with zeros. Values that were
set inside such a kernel hold until it ends.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from tonnage.script.attribution import address_of
from tonnage.virtual.driver.device import DriverDevice

# Values of larger tensors are not kept.
MOST_INTEGERS = 1 << 22
MOST_FLOATS = 1 << 20


# Operators inside each other that are looked at.
_MOST_RUNNING = 64
_NOT_NESTED = 0


@dataclass(slots=True)
class _Mirror:
    """The bytes of a storage on the card, kept on the host, as of one tensor version."""

    storage: Any
    version: int = 0
    # The call of the operator whose kernel set the values on its way.
    inside: int = _NOT_NESTED


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
        self._core = device.core
        self._tracked: set[str] = set()  # operators
        self._follows_writes = False
        self._with_kernel: dict[str, bool] = {}

    def is_known(self, tensor: Any) -> bool:
        """Whether the values of a tensor on the card are known; one without elements has none to know."""
        return bool(tensor.is_cuda and not tensor.numel()) or self._mirror(tensor) is not None

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
        if not tensor.numel():
            return self._host_empty(tensor.shape, tensor.dtype)
        mirror = self._mirror(tensor)
        assert mirror is not None
        values = self._host_empty((0,), tensor.dtype)
        values.set_(mirror.storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            values = values.conj()
        return values._neg_view() if tensor.is_neg() else values

    def put(self, tensor: Any, values: Any, fresh: bool = False, guess: bool = False, in_place: bool = False) -> None:
        """Set the values of the tensor. A `fresh` one's storage holds nothing else, and may be larger.

        A `guess` was assumed, or computed from what was. `in_place` says that the operator at work writes this tensor,
        which may raise its version when it ends.
        """
        if not tensor.is_cuda or not tensor.numel() or not self._may_be_known(tensor):
            return
        self._device.drain()  # log entries may concern earlier blocks at these addresses
        address = address_of(tensor)
        mirror = self._mirror(tensor)
        if mirror is None:
            if not fresh and not self._is_whole(tensor):
                return  # part of an unknown storage
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            elements = tensor.storage_offset() + last + 1 if tensor.numel() else 0
            mirror = _Mirror(self._torch.UntypedStorage(elements * tensor.element_size(), device="cpu"))
        self._renew(mirror, tensor, in_place)
        self._mirrors[address] = mirror
        self._laws.pop(address, None)
        if guess:
            self._guessed.add(address)
        elif self._guessed and (fresh or self._is_whole(tensor)):
            self._guessed.discard(address)
        target = self.host_view(tensor)
        values = values.reshape(tensor.shape) if values.shape != tensor.shape else values
        for dim in repeating_dims(tensor):
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        target.copy_(values)

    def _renew(self, mirror: _Mirror, tensor: Any, in_place: bool) -> None:
        """Note as of when and for how long the values hold that the operator at work has set."""
        operators = self._operators_at_work()
        mirror.inside = self._enclosing_kernel(operators)
        mirror.version = version_of(tensor)
        if tensor.is_inference():
            if not self._follows_writes:
                self._follow_writes()
        elif in_place and operators:
            mirror.version += _raises_version(operators)

    def _operators_at_work(self) -> list[tuple[str, int, bool]]:
        """List the operators that run, innermost first: name, number of the call, and whether it raises versions."""
        names, raising = (ctypes.c_int32 * _MOST_RUNNING)(), (ctypes.c_int32 * _MOST_RUNNING)()
        calls = (ctypes.c_int64 * _MOST_RUNNING)()
        count = self._core.tn_running(names, calls, raising, _MOST_RUNNING)
        name = self._device.operator_name
        return [(name(names[at]), calls[at], bool(raising[at])) for at in range(count)]

    def _follow_writes(self) -> None:
        """Track operators that write a tensor, because tensors of inference mode have no version."""
        self._follows_writes = True

    def _enclosing_kernel(self, operators: list[tuple[str, int, bool]]) -> int:
        """Return the innermost call of an operator whose kernel called the one at work."""
        for name, call, _ in operators:
            # Under autocast, an operator is called again by itself.
            if name != operators[0][0] and self._has_kernel(name):
                return call
        return _NOT_NESTED

    def _has_kernel(self, operator: str) -> bool:
        """Whether the operator has a kernel of its own for CUDA, rather than calling others."""
        if operator not in self._with_kernel:
            namespace, _, name = operator.partition("::")
            # Custom operators in Python may return what they have computed with tracked operators.
            packet = getattr(self._torch.ops.aten, name, None) if namespace == "aten" else None
            overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
            self._with_kernel[operator] = any(map(self._is_kernel, overloads))
        return self._with_kernel[operator]

    def _is_kernel(self, overload: Any) -> bool:
        """Whether this overload has a kernel for CUDA. One with `out=` that is tracked may be called by another overload."""
        dispatch, name = self._torch._C, overload.name()
        if name in self._tracked and any(argument.is_out for argument in overload._schema.arguments):
            return False
        # Some overloads are TorchScript's alone.
        if not dispatch._dispatch_has_kernel(name):
            return False
        return bool(dispatch._dispatch_has_kernel_for_dispatch_key(name, "CUDA"))

    def _host_empty(self, shape: Any, dtype: Any) -> Any:
        """Return a new tensor on the host, whatever the default device is."""
        return self._plain.empty(shape, dtype=dtype, device="cpu")

    def _is_whole(self, tensor: Any) -> bool:
        """Whether the tensor spans its storage, without asking for its size (see `address_of`)."""
        try:
            self._plain.as_strided(tensor, (tensor.numel() + 1,), (1,), 0)
        except RuntimeError:  # one more element is out of bounds
            return True
        return False

    def _may_be_known(self, tensor: Any) -> bool:
        if tensor.layout is not self._torch.strided:
            return False
        limit = MOST_FLOATS if tensor.dtype.is_floating_point or tensor.is_complex() else MOST_INTEGERS
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
        # A version that is smaller is that of a tensor which an operator is still writing.
        is_overwritten = version_of(tensor) > mirror.version
        if is_overwritten or (mirror.inside and not self._core.tn_is_running(ctypes.c_int64(mirror.inside))):
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
        if number and not self._enclosing_kernel(self._operators_at_work()):
            self._device.drain()  # log entries may concern earlier blocks at this address
            self._laws[address_of(tensor)] = number


def repeating_dims(tensor: Any) -> list[int]:
    """Return the dimensions along which a tensor was expanded."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [dim for dim, (size, stride) in enumerate(sizes) if stride == 0 and size > 1]


def without_repeats(tensor: Any) -> Any:
    """Narrow an expanded tensor so that each element in memory occurs once."""
    for dim in repeating_dims(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _raises_version(operators: list[tuple[str, int, bool]]) -> bool:
    """Whether the version of what the innermost operator writes rises when it ends, or when one ends that called it.

    Torch raises it once, in the outermost operator that writes.
    """
    innermost = operators[0][0]
    for name, _, raises in operators:
        if not name.endswith("_") and name != innermost:
            return False
        if raises:
            return True
    return False


def version_of(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:  # inference tensors have no version counter
        return 0
