"""Large host tensors whose values are not needed: the weights of a model that is built on the host and moved to the
card.

Random initialisation leaves them unwritten, and results computed from unwritten tensors alone stay unwritten. Large
tensors get fresh pages from the system, so pages that are never written cost no memory: a 70B model builds in
seconds. The generator skips the numbers they would have taken, so later random numbers are the same as on a real GPU.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from tonnage.virtual.driver.build import CORE
from tonnage.virtual.driver.following import Follower, Keywords, Run

LARGE_BYTES = 1 << 20
FRESH_BYTES = 32 << 20  # a new host tensor of this size has fresh pages with any setting of malloc
# The first do not fill large host tensors, and the second leave results of unwritten tensors unwritten.
FILLS = "normal_ uniform_".split()
DERIVES = (
    "add.Tensor add_.Tensor sub.Tensor sub_.Tensor mul.Tensor mul_.Tensor div.Tensor div_.Tensor clamp clamp_ "
    "clamp_min clamp_min_ erfinv erfinv_ cat stack linalg_qr sign triu tril sqrt sqrt_ rsqrt exp pow.Tensor_Scalar neg"
).split()
# Words in the state of the Mersenne Twister
_WORDS = 624
_SMALL = 1 << 10


class Unwritten:
    """Tracks the host operators that fill and derive large tensors."""

    def __init__(self, follower: Follower, torch: Any) -> None:
        self._torch = torch
        # Use torch's originals: libraries may replace the public functions (DeepSpeed ZeRO 3 does).
        self._plain = torch._C._VariableFunctions
        self._addresses: dict[int, int] = {}
        self._follower = follower
        self._core = ctypes.CDLL(CORE)

    def install(self) -> None:
        """Track the operators until the session's follower is released."""
        for names, wrapper in ((FILLS, self._fill), (DERIVES, self._derive), (["copy_"], self._copy)):
            for name in names:
                self._follower.follow("aten", name, "CPU", wrapper)

    def _is_large(self, tensor: Any) -> bool:
        return bool(
            tensor.dtype.is_floating_point and tensor.is_cpu and tensor.numel() * tensor.element_size() >= LARGE_BYTES
            and tensor.layout is self._torch.strided
        )  # fmt: skip

    def is_unwritten(self, tensor: Any) -> bool:
        """Whether this large host tensor was never written."""
        if not self._addresses or not self._is_large(tensor):
            return False
        size = self._addresses.get(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())
        return size is not None and size == tensor.untyped_storage().nbytes()

    def _mark(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if tensor.numel() * tensor.element_size() == storage.nbytes():
            self._addresses[storage.data_ptr()] = storage.nbytes()

    def _fill(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Mark a large tensor as unwritten instead of filling it."""
        target = arguments[0]
        if not self._is_large(target) or not target.is_contiguous():
            return call()
        self._mark(target)
        # Fill a small tensor of the same remainder, because the last elements are drawn twice or in part; skip the
        # rest.
        torch = self._torch
        small = self._plain.empty(_SMALL + target.numel() % _SMALL, dtype=target.dtype, device="cpu")
        skipped = (2 if target.dtype is torch.float64 else 1) * (target.numel() - small.numel())  # 32-bit numbers
        # The generator's state: the seed, how many numbers are left, which is next, and the twister's words.
        generator = keywords.get("generator") or torch.default_generator
        state = generator.get_state()
        longs, integers = state.view(torch.int64), state.view(torch.int32)
        words = longs[3 : 3 + _WORDS].to(torch.uint32)
        left, following = ctypes.c_int32(int(integers[2])), ctypes.c_uint32(int(longs[2]))
        self._core.tn_pass_over(
            ctypes.c_void_p(words.data_ptr()), ctypes.byref(left), ctypes.byref(following), ctypes.c_int64(skipped)
        )
        longs[3 : 3 + _WORDS] = words.to(torch.int64)
        integers[2], longs[2] = left.value, following.value
        generator.set_state(state)
        operator(small, *arguments[1:], **keywords)
        return target

    def _copy(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        to, source = arguments[0], arguments[1]
        if not (self._is_large(to) and self.is_unwritten(source)):
            return call()
        self._mark(to)
        return to

    def _derive(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Leave results unwritten if all tensor operands, apart from scalars, are."""
        from torch.utils._pytree import tree_map_only

        torch = self._torch
        given = [a for part in arguments for a in (part if isinstance(part, (list, tuple)) else (part,))]
        tensors = [a for a in given if isinstance(a, torch.Tensor) and a.dim()]
        if not self._addresses or not tensors or not all(map(self.is_unwritten, tensors)):
            return call()
        if operator._schema.name.endswith("_"):
            return arguments[0]
        meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta") if tensor.dim() else tensor, arguments)

        def leave(made: Any) -> Any:
            result = self._plain.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="cpu")
            if not self._is_large(result):
                return result.zero_()
            self._mark(result)
            return result

        return tree_map_only(torch.Tensor, leave, operator(*meta, **keywords))
