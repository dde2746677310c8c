"""Tracks values on the virtual card under a CUDA build of torch: what is known, what may be assumed, and
placeholders.

Torch's own kernels run their host code and write nothing. Operators that read values, compare them or choose sizes by
them get a wrapper on the CUDA key that calls torch's kernel and then records what is known of the result. Small
integer tensors, masks and scalars with known values have a copy of their storage on the host, and operators on known
values are computed there. Results of random numbers are assumptions (`assumptions`); other values are placeholders,
which are counted.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tonnage.script.attribution import address_of
from tonnage.virtual.assumptions import as_mask, beyond_tolerance, distinct_values
from tonnage.virtual.driver.collectives import COLLECTIVES, Collectives
from tonnage.virtual.driver.followed import CHOSEN, EVALUATED, FILLS, FLAGS, REDUCED, SAMPLERS
from tonnage.virtual.driver.following import Keywords, Run
from tonnage.virtual.driver.known import MOST_INTEGERS, KnownValues, version_of, without_repeats

if TYPE_CHECKING:
    from tonnage.virtual.driver.session import DriverSession

_NAMES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip
_DECISIVE = {"bitwise_or": 1, "logical_or": 1, "bitwise_and": 0, "logical_and": 0, "mul": 0}
_ALL_TRUE = "Every element of a mask whose values are not known counts as true."
_SHARE = "Of a mask made from random numbers, or too large to keep, the share is true that its comparison gives."
_DISTINCT = "All values that are not known count as distinct."
_EXPECTED = "As many random values are distinct as may be expected of their number and range."
_UNIFORM = "Indices that depend on computed values are drawn uniformly."


class DriverValues(KnownValues):
    """Tracks the operators of one card that read values, compare them or decide by them."""

    def __init__(self, session: "DriverSession", torch: Any) -> None:
        super().__init__(session.device, torch)
        self._session = session
        self._follower = session.follower
        self._generator: Any = None
        self._told: list[float] = []

    def install(self) -> None:
        """Track the operators until the session's follower is released."""
        torch = self._torch
        self._generator = torch.Generator().manual_seed(0)
        for name, wrapper in self._wrappers():
            self._follower.follow("aten", name, "CUDA", wrapper)
        self._follower.follow("aten", "_coalesce", "SparseCUDA", self._coalesced)
        for name in COLLECTIVES:
            self._follower.follow("c10d", name, "CUDA", Collectives(self, torch).follow)

    def _wrappers(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        for names, wrapper in (
            (["_local_scalar_dense"], self._read_scalar),
            (["copy_"], self._copy),
            (["nonzero"], self._nonzero),
            (["equal"], self._equal),
            (["histc"], self._histogram),
            (["_unique2", "unique_consecutive", "unique_dim"], self._unique),
            (EVALUATED, self._evaluated),
            (SAMPLERS, self._sampled),
            (FILLS, self._filled),
            (FLAGS, self._flag),
            (CHOSEN, self._chosen),
        ):
            yield from ((name, wrapper) for name in names)

    def _evaluated(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run the operator, and compute its values on the host if all inputs are known."""
        tensors = list(_tensors(arguments, self._torch.Tensor))
        known = bool(self._mirrors) and all(not t.is_cuda or self._mirror(t) is not None for t in tensors)
        if known and operator._schema.name.removeprefix("aten::") not in REDUCED:
            # Results of an expanded operand may be too large to keep.
            known = all(t.numel() <= MOST_INTEGERS for t in tensors)
        if not known:
            decided = self._decided(operator, tensors)
            result = call()
            self._follow_law(operator, arguments, result)
            if decided is not None:
                self.put(result, self._plain.full(result.shape, decided, dtype=result.dtype))
                return result
            if operator._schema.name.endswith("_"):
                self.dropped(address_of(arguments[0]))
            return result
        in_place = operator._schema.name.endswith("_")
        on_host = _mapped(arguments, self._torch.Tensor, lambda t: self.host_view(t) if t.is_cuda else t)
        # In place, the mirror itself is written; otherwise inputs must be read before torch may reuse their blocks.
        values = None if in_place else _quietly(operator, on_host, keywords)
        result = call()
        if in_place:
            _quietly(operator, on_host, keywords)
            mirror = self._mirror(arguments[0])
            if mirror is not None:
                mirror.version = version_of(arguments[0])
        elif values is not None:
            for made, value in zip(_flat(result), _flat(values), strict=False):
                if isinstance(made, self._torch.Tensor):
                    self.put(made, value)
        return result

    def _decided(self, operator: Any, tensors: Sequence[Any]) -> int | None:
        """Return 1 or 0 if one known operand of `|` or `&` decides the result alone, else None."""
        decisive = _DECISIVE.get(operator._schema.name.removeprefix("aten::").rstrip("_"))
        if decisive is None:
            return None
        for tensor in tensors:
            if not tensor.is_cuda or self._mirror(tensor) is None:
                continue
            if bool((without_repeats(self.host_view(tensor)) == decisive).all()):
                return decisive
        return None

    def _follow_law(self, operator: Any, arguments: Sequence[Any], result: Any) -> None:
        """Derive the law of the result from those of the operands."""
        tensor = self._torch.Tensor
        if not self._laws or not isinstance(result, tensor) or not result.numel():
            return
        operands = [
            self._operand(argument) for argument in arguments if isinstance(argument, (tensor, int, float, bool))
        ]
        if not any(isinstance(operand, int) for operand in operands):
            return
        elements = next(a.numel() for a in arguments if isinstance(a, tensor))
        dtype = _NAMES.get(str(result.dtype).removeprefix("torch."), "")
        number, value = self._session.laws.follow(operator._schema.name, operands, elements, result.numel(), dtype)
        if value is not None:
            self.put(result, self._plain.full(result.shape, value, dtype=result.dtype))
        else:
            self._keep_law(result, number)

    def _operand(self, argument: Any) -> Any:
        """Convert to what `Laws.follow` takes: a law's number, a plain number, the mean of known values, or None."""
        if not isinstance(argument, self._torch.Tensor):
            return float(argument)
        if number := self._law_number(argument):
            return number
        if argument.is_cuda and self._mirror(argument) is None:
            return None
        return (float(without_repeats(self._on_host(argument)).double().mean()),) if argument.numel() else None

    def _sampled(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run the operator and record the distribution of its random numbers."""
        result = call()
        target = arguments[0]
        address = address_of(target)
        self.dropped(address)
        numbers = [self._operand(a) if isinstance(a, self._torch.Tensor) else a for a in arguments]
        operands = [
            None,
            *(float(a) if isinstance(a, (int, float)) and not isinstance(a, bool) else a for a in numbers[1:]),
        ]
        dtype = _NAMES.get(str(target.dtype).removeprefix("torch."), "")
        number, _ = self._session.laws.follow(operator._schema.name, operands, target.numel(), target.numel(), dtype)
        self._keep_law(target, number)
        return result

    def _filled(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        result = call()
        target = keywords.get("out", arguments[0])
        if not self._may_be_known(target):
            self.dropped(address_of(target))
            return result
        host = self._plain.empty(target.shape, dtype=target.dtype)
        name = operator._schema.name
        if name == "aten::zero_":
            self.put(target, host.zero_())
        elif name == "aten::fill_":
            value = arguments[1]
            if not isinstance(value, self._torch.Tensor) or not value.is_cuda or self._mirror(value) is not None:
                self.put(target, host.fill_(self._on_host(value) if isinstance(value, self._torch.Tensor) else value))
        else:
            self.put(target, operator(*arguments, out=host))
        return result

    def _flag(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Track comparisons with numbers that no computed value reaches: nothing is infinite, and no tolerance is met."""
        result = self._evaluated(operator, call, arguments, keywords)
        if self._mirror(result) is not None or not self._may_be_known(result):
            return result
        name = operator._schema.name.removeprefix("aten::")
        answer = _expected(name, arguments)
        if (
            answer is None
            and result.numel() == 1
            and arguments[0].is_floating_point()
            and isinstance(arguments[-1], (int, float))
        ):
            answer = beyond_tolerance(name, float(arguments[-1]))
        if answer is not None:
            self.put(result, self._plain.full(result.shape, answer, dtype=result.dtype))
        return result

    def _chosen(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Track indices of the largest or sampled elements; for unknown values all are equally likely."""
        result = self._evaluated(operator, call, arguments, keywords)
        indices = _flat(result)[-1]
        if self._mirror(indices) is not None or not self._may_be_known(indices) or not indices.numel():
            return result
        self._session.stand_ins.assume(operator._schema.name.removeprefix("aten::"), _UNIFORM)
        # The argument `dim`: given by position, by name, or the default.
        source, dim = arguments[0], None
        for at, argument in enumerate(operator._schema.arguments):
            if argument.name == "dim":
                dim = arguments[at] if at < len(arguments) else keywords.get("dim", argument.default_value)
        takes_all = dim is None and operator._schema.name != "aten::multinomial"
        dim = -1 if dim is None else dim
        choices = source.numel() if takes_all else source.shape[dim]
        drawn = self._plain.randint(max(choices, 1), indices.shape, generator=self._generator)
        if indices.dim() == source.dim() and indices.dim():  # distinct indices, as topk returns
            rows = indices.numel() // indices.shape[dim]
            if rows * choices <= 1 << 18:
                # Integers, because large float tensors are left unwritten.
                ranks = self._plain.randint(1 << 31, (rows, choices), generator=self._generator)
                ranked = ranks.topk(indices.shape[dim]).indices
                shape = list(indices.shape)
                count = shape.pop(dim)
                drawn = ranked.reshape(*shape, count).movedim(-1, dim)
        self.put(indices, drawn)
        return result

    # Reading values

    def _read_scalar(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        call()
        tensor = arguments[0]
        if self._told:
            return self._told.pop(0)
        if self._mirror(tensor) is not None:
            return self.host_view(tensor).item()
        dtype = _NAMES.get(str(tensor.dtype).removeprefix("torch."), str(tensor.dtype))
        value = self._session.stand_ins.read(dtype, -1)
        return value if tensor.dtype.is_floating_point else bool(value) if dtype == "Bool" else int(value)

    def _copy(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        to, source = arguments[0], arguments[1]
        result = call()
        from_card = source.is_cuda
        known = self._mirror(source) is not None if from_card else self._may_be_known(source)
        if to.is_cuda:
            law = self._law_number(source) if from_card else 0
            if known:
                self.put(to, self._on_host(source).expand(to.shape))
            else:
                self.dropped(address_of(to))
                if law:
                    dtype = _NAMES.get(str(to.dtype).removeprefix("torch."), "")
                    number, _ = self._session.laws.follow("aten::copy_", [law], to.numel(), to.numel(), dtype)
                    self._keep_law(to, number)
        elif from_card and known:
            to.copy_(self.host_view(source).expand(to.shape))
        elif from_card:
            dtype = _NAMES.get(str(source.dtype).removeprefix("torch."), str(source.dtype))
            to.fill_(self._session.stand_ins.read(dtype, source.numel()))
        return result

    def _equal(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Compare two tensors: a tensor equals itself, and unknown values differ."""
        one, other = arguments[0], arguments[1]
        call()
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one is other or not one.numel():
            return True
        if self._mirror(one) is None or self._mirror(other) is None:
            return bool(self._session.stand_ins.read("Bool", -1))
        return bool((self.host_view(one) == self.host_view(other)).all())

    # Sizes that depend on values: torch's code reads them back, and gets the number from here

    def _told_call(self, call: Run, *numbers: int) -> Any:
        """Run torch's code and let it read these numbers: some versions read a scalar, others copy it themselves."""
        self._told = list(numbers)
        self._session.core.tn_tell(len(numbers), (ctypes.c_int64 * len(numbers))(*numbers))
        result = call()
        self._told = []
        return result

    def _nonzero(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        mask, found = arguments[0], None
        if self._mirror(mask) is not None:
            held = without_repeats(self.host_view(mask))
            count = int(held.count_nonzero()) * (mask.numel() // max(held.numel(), 1))
            if count * mask.dim() <= MOST_INTEGERS:
                found = self.host_view(mask).nonzero()
        else:
            law = self._session.laws.of(self._law_number(mask))
            self._session.stand_ins.assume("nonzero", _ALL_TRUE if law is None else _SHARE)
            count = mask.numel() if law is None else as_mask(law).count(mask.numel())
            if count == mask.numel() and count * mask.dim() <= MOST_INTEGERS:
                found = self._plain.ones(mask.shape, dtype=self._torch.bool).nonzero()
        result = self._told_call(call, count)
        if found is not None:
            self.put(result, found, fresh=True)
        return result

    def _histogram(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run a histogram without given bounds, which torch reads from the card: any two will do."""
        self._told = [0.0, 1.0]
        result = call()
        self._told = []
        return result

    def _unique(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        tensor = arguments[0]
        if self._mirror(tensor) is not None:
            values = operator(*_mapped(arguments, self._torch.Tensor, self._on_host), **keywords)
            result = self._told_call(call, values[0].shape[0])
            for made, value in zip(result, values, strict=True):
                if made.numel() == value.numel():
                    self.put(made, value, fresh=True)
            return result
        law = self._session.laws.of(self._law_number(tensor))
        elements = tensor.shape[arguments[1]] if operator._schema.name == "aten::unique_dim" else tensor.numel()
        self._session.stand_ins.assume(
            operator._schema.name.removeprefix("aten::"), _DISTINCT if law is None else _EXPECTED
        )
        return self._told_call(call, distinct_values(law, elements))

    def _coalesced(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        indices, found = arguments[0]._indices(), None
        if indices.shape[1] < 2:  # torch does not read these
            return call()
        if self._mirror(indices) is not None:
            sizes = arguments[0].shape[: indices.shape[0]]
            flat = self.host_view(indices).T.long() @ self._plain.tensor(
                [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
            )
            flat = flat.unique()
            found = self._torch.stack(self._torch.unravel_index(flat, sizes))
            count = len(flat)
        else:
            law = self._session.laws.of(self._law_number(indices))
            self._session.stand_ins.assume("coalesce", _DISTINCT if law is None else _EXPECTED)
            count = min(distinct_values(law, indices.shape[1]), math.prod(arguments[0].shape[: indices.shape[0]]))
        result = self._told_call(call, count)
        if found is not None:
            self.put(result._indices(), found, fresh=True)
        return result


def _expected(name: str, arguments: Sequence[Any]) -> bool | None:
    """Return the result of a comparison of ordinary numbers, if it is clear."""
    if name in ("isnan", "isposinf", "isneginf", "isinf"):
        return False
    other = arguments[1] if len(arguments) > 1 else None
    if name == "eq" and arguments[0] is other:
        return True
    if not arguments[0].is_floating_point():
        # Lengths, counts and indices, which repeat_interleave and losses check against their bounds.
        if name == "ge" and other == 0:
            return True
        if name == "lt" and arguments[0].dim() == 0 and isinstance(other, int) and other > 0:
            return True
    if name in ("eq", "ne") and isinstance(other, float) and math.isinf(other):
        return name == "ne"
    return None


def _tensors(values: Any, kind: type) -> Iterator[Any]:
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value, kind)


def _mapped(values: Any, kind: type, change: Callable[[Any], Any]) -> list[Any]:
    return [
        change(value)
        if isinstance(value, kind)
        else _mapped(value, kind, change)
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _quietly(operator: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Run the operator on the host; return None if it does not support these types there."""
    keywords = {name: value for name, value in keywords.items() if name not in ("device", "pin_memory", "out")}
    try:
        return operator(*arguments, **keywords)
    except (RuntimeError, NotImplementedError, IndexError):
        return None
