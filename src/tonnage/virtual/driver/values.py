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
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.script.attribution import address_of
from tonnage.virtual.assumptions import Law, as_mask, beyond_tolerance, distinct_values
from tonnage.virtual.driver.following import Keywords, Run
from tonnage.virtual.driver.known import MOST_INTEGERS, KnownValues, without_repeats
from tonnage.virtual.driver.unwritten import FRESH_BYTES, LARGE_BYTES

if TYPE_CHECKING:
    from tonnage.virtual.driver.session import DriverSession

_TRACKED: dict[str, list[str]] = {
    kind: names.split()
    for kind, names in tomllib.loads((Path(__file__).parents[1] / "data" / "values.toml").read_text("utf-8")).items()
}
# The names that each of these has with both kinds of operand, and in place.
_EVALUATED = [
    *(
        f"{name}{suffix}.{kind}"
        for name in _TRACKED["arithmetic"]
        for kind in ("Tensor", "Scalar")
        for suffix in ("", "_")
    ),
    *_TRACKED["evaluated"],
]
_FLAGS = [
    *_TRACKED["flags"],
    *(f"{name}.{overload}" for name in _TRACKED["comparisons"] for overload in ("Scalar", "Tensor")),
]
_REDUCED = frozenset(_TRACKED["reduced"])
_NAMES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip
_DECISIVE = {"bitwise_or": 1, "logical_or": 1, "bitwise_and": 0, "logical_and": 0, "mul": 0}
_MOST_CHECKS = 4  # that an operator makes of its arguments
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
        self._generator: Any = None
        self._told: list[float] = []

    def install(self) -> None:
        """Track the operators until the session's follower is released."""
        self._generator = self._torch.Generator().manual_seed(0)
        for namespace, key, wrapper, names in (
            ("aten", "CUDA", self._read_scalar, ["_local_scalar_dense"]),
            ("aten", "CUDA", self._copy, ["copy_"]),
            ("aten", "CUDA", self._nonzero, ["nonzero"]),
            ("aten", "CUDA", self._equal, ["equal"]),
            ("aten", "CUDA", self._close, ["allclose"]),
            ("aten", "CUDA", self._unscaled, ["_amp_foreach_non_finite_check_and_unscale_"]),
            ("aten", "CUDA", self._contained, ["isin.Tensor_Tensor", "isin.Tensor_Scalar"]),
            ("aten", "CUDA", self._histogram, ["histc"]),
            ("aten", "CUDA", self._unique, ["_unique", "_unique2", "unique_consecutive", "unique_dim"]),
            ("aten", "CUDA", self._evaluated, _EVALUATED),
            ("aten", "CUDA", self._sampled, _TRACKED["sampled"]),
            ("aten", "CUDA", self._bernoulli, ["bernoulli", "bernoulli.p"]),
            ("aten", "CUDA", self._filled, _TRACKED["filled"]),
            ("aten", "CUDA", self._flag, _FLAGS),
            ("aten", "CUDA", self._checked, _TRACKED["checked"]),
            ("aten", "CUDA", self._overwritten, _TRACKED["overwritten"]),
            ("aten", "CUDA", self._chosen, _TRACKED["chosen"]),
            ("aten", "SparseCUDA", self._coalesced, ["_coalesce"]),
            ("c10d", "CUDA", self._collective, _TRACKED["collectives"]),
        ):
            for name in names:
                self._session.follower.follow(namespace, name, key, wrapper)
                self._tracked.add(f"{namespace}::{name}")

    def _follow_writes(self) -> None:
        super()._follow_writes()
        for name in self._torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            namespace, _, operator = name.partition("::")
            if namespace == "aten" and name not in self._tracked and _is_write(operator):
                self._session.follower.follow("aten", operator, "CUDA", self._overwritten)

    def _overwritten(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run an operator that writes values which are not known."""
        result = call()
        if not self._mirrors and not self._laws:
            return result
        for tensor in self._tensors(_written(operator, arguments, keywords)):
            if tensor.is_cuda:
                self.dropped(address_of(tensor))
        return result

    def _unscaled(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run the check of scaled gradients, which are finite: the flag that it would set stays as it is."""
        flag = arguments[1]
        values = self.host_view(flag).clone() if self.is_known(flag) else None
        result = call()
        for gradient in arguments[0]:
            self.dropped(address_of(gradient))
        if values is not None:
            self.put(flag, values, in_place=True)
        return result

    def _evaluated(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run the operator, and compute its values on the host if all inputs are known."""
        name = _name(operator)
        in_place = name.endswith("_")
        tensors = list(self._tensors(arguments))
        known = all(not t.is_cuda or self.is_known(t) for t in tensors)
        if known and name not in _REDUCED:
            # Results of an expanded operand may be too large to keep.
            known = all(t.numel() <= MOST_INTEGERS for t in tensors)
        if not known:
            decided, is_guess = None, False
            if tensors and (decisive := _DECISIVE.get(name.rstrip("_"))) is not None:
                # One known operand of `|` or `&` may decide the result alone.
                here = [t for t in tensors if t.is_cuda and self.is_known(t)]
                deciding = [t for t in here if bool((without_repeats(self.host_view(t)) == decisive).all())]
                if deciding:
                    decided = decisive
                    is_guess = all(self.is_guessed(t) for t in deciding)
            result = call()
            if self._laws:
                self._follow_law(operator, arguments, result)
            if decided is not None:
                self._put_number(result, decided, guess=is_guess, in_place=in_place)
            elif in_place:
                self.dropped(address_of(arguments[0]))
            return result
        on_host = self._host_copy(arguments)
        if in_place:
            # The operator may call another one that is tracked and writes the same values.
            on_host[0] = on_host[0].clone()
        # Inputs must be read before torch may reuse their blocks.
        values = _quietly(operator, on_host, keywords)
        guess = self.is_guessed(*tensors)
        result = call()
        if values is not None:
            for made, value in zip(self._tensors([result]), self._tensors([values]), strict=False):
                self.put(made, value, guess=guess, in_place=in_place)
        elif in_place:
            self.dropped(address_of(arguments[0]))
        return result

    def _tensors(self, values: Any) -> Iterator[Any]:
        for value in values:
            if isinstance(value, self._torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from self._tensors(value)

    def _host_copy(self, value: Any) -> Any:
        """Return an argument with its tensors on the host; those on the card must be known."""
        if isinstance(value, (list, tuple)):
            return [self._host_copy(each) for each in value]
        return self._on_host(value) if isinstance(value, self._torch.Tensor) else value

    def _put_number(self, tensor: Any, number: float, *, guess: bool = False, in_place: bool = False) -> None:
        """Set all values of the tensor to one number."""
        values = self._plain.full(tensor.shape, number, dtype=tensor.dtype, device="cpu")
        self.put(tensor, values, guess=guess, in_place=in_place)

    def _follow_law(self, operator: Any, arguments: Sequence[Any], result: Any) -> None:
        """Derive the law of the result from those of the operands."""
        tensor = self._torch.Tensor
        if not isinstance(result, tensor) or not result.numel():
            return
        if not any(isinstance(argument, tensor) and self._law_number(argument) for argument in arguments):
            return
        operands = [self._operand(a) for a in arguments if isinstance(a, (tensor, int, float, bool, complex))]
        elements = next(a.numel() for a in arguments if isinstance(a, tensor))
        self._derive_law(operator._schema.name, operands, elements, result)

    def _derive_law(self, name: str, operands: Sequence[Any], elements: int, result: Any) -> None:
        """Keep the law of an operator's result, or its value if all elements are equal."""
        number, value = self._session.laws.follow(name, operands, elements, result.numel(), _dtype(result))
        if value is not None:
            self._put_number(result, value)
        else:
            self._keep_law(result, number)

    def _operand(self, argument: Any) -> Any:
        """Convert to what `Laws.follow` takes: a law's number, a plain number, the mean of known values, or None."""
        if isinstance(argument, complex):
            return None
        if not isinstance(argument, self._torch.Tensor):
            return float(argument)
        if number := self._law_number(argument):
            return number
        if argument.is_complex() or (argument.is_cuda and not self.is_known(argument)):
            return None
        return (float(without_repeats(self._on_host(argument)).double().mean()),) if argument.numel() else None

    def _sampled(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run the operator and record the distribution of its random numbers."""
        result = call()
        target, *numbers = arguments
        self.dropped(address_of(target))
        operands = [None if number is None else self._operand(number) for number in numbers]
        self._derive_law(operator._schema.name, [None, *operands], target.numel(), target)
        return result

    def _bernoulli(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run the operator and record the share of its ones: that of the probabilities, or the one given."""
        result = call()
        probability = arguments[1] if len(arguments) > 1 else arguments[0]
        self._derive_law("aten::bernoulli_", [None, self._operand(probability)], result.numel(), result)
        return result

    def _filled(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        result = call()
        target = keywords.get("out", arguments[0])
        if not self._may_be_known(target):
            self.dropped(address_of(target))
            return result
        host = self._host_empty(target.shape, target.dtype)
        name = _name(operator)
        if name == "zero_":
            self.put(target, host.zero_(), in_place=True)
        elif name != "fill_":
            self.put(target, operator(*arguments, out=host), in_place=True)
        elif not getattr(arguments[1], "is_cuda", False) or self.is_known(arguments[1]):
            self.put(target, host.fill_(self._host_copy(arguments[1])), in_place=True)
        else:
            self.dropped(address_of(target))
        return result

    def _flag(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Track comparisons with numbers that no computed value reaches: nothing is infinite, and no tolerance is met."""
        result = self._evaluated(operator, call, arguments, keywords)
        if self._mirror(result) is not None or not self._may_be_known(result):
            return result
        name, operand = _name(operator), arguments[0]
        number = self._number(arguments[1]) if len(arguments) > 1 else None
        if len(arguments) > 1 and name == "eq" and operand is arguments[1]:
            answer: bool | None = True
        else:
            answer = _expected(name, operand, number)
        if answer is None and result.numel() == 1 and operand.is_floating_point() and number is not None:
            answer = beyond_tolerance(name, float(number))
        if answer is not None:
            self._put_number(result, answer, guess=True)
        return result

    def _number(self, operand: Any) -> float | None:
        """Return a plain number, or that of a known tensor without dimensions; None otherwise."""
        if isinstance(operand, (bool, int, float)):
            return operand
        if not isinstance(operand, self._torch.Tensor) or operand.dim() or operand.is_complex():
            return None
        if operand.is_cuda and not self.is_known(operand):
            return None
        number: float = self._on_host(operand).item()
        return number

    def _chosen(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Track indices of the largest or sampled elements; for unknown values all are equally likely."""
        if _name(operator) == "multinomial":
            # The script's generators of the host give no number for this.
            keywords = {**keywords, "generator": self._generator}
        result = self._evaluated(operator, call, arguments, keywords)
        *_, indices = self._tensors([result])
        if self.is_known(indices) or not self._may_be_known(indices):
            return result
        self._session.stand_ins.assume(_name(operator), _UNIFORM)
        source, dim = arguments[0], _argument(operator, arguments, keywords, "dim")
        takes_all = (dim is None and _name(operator) != "multinomial") or not source.dim()
        dim = -1 if dim is None else dim
        choices = source.numel() if takes_all else source.shape[dim]
        drawn = self._draw(max(choices, 1), indices.shape)
        can_be_distinct = indices.dim() == source.dim() and indices.dim() and indices.shape[dim] <= choices
        if can_be_distinct:  # as topk returns
            rows = indices.numel() // indices.shape[dim]
            if rows * choices <= 1 << 18:
                # Integers, because large float tensors are left unwritten.
                ranks = self._draw(1 << 31, (rows, choices))
                ranked = ranks.topk(indices.shape[dim]).indices
                shape = list(indices.shape)
                count = shape.pop(dim)
                drawn = ranked.reshape(*shape, count).movedim(-1, dim)
        self.put(indices, drawn, guess=True)
        return result

    def _draw(self, choices: int, shape: Sequence[int]) -> Any:
        """Draw integers on the host, whatever the default device is, without a number of the script's generator."""
        return self._plain.randint(choices, shape, generator=self._generator, device="cpu", dtype=self._torch.int64)

    # Reading values

    def _read_scalar(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        call()
        tensor = arguments[0]
        if self._told:
            return self._told.pop(0)
        dtype = _dtype(tensor) or str(tensor.dtype)
        guess = None
        if self._mirror(tensor) is not None:
            known = self.host_view(tensor).item()
            if not self.is_guessed(tensor):
                return known
            guess = float(known)
        value = self._session.stand_ins.read(dtype, -1, guess)
        return value if tensor.dtype.is_floating_point else bool(value) if dtype == "Bool" else int(value)

    def _copy(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        to, source = arguments[0], arguments[1]
        result = call()
        from_card = source.is_cuda
        known = self.is_known(source) if from_card else self._may_be_known(source)
        if to.is_cuda:
            law = self._law_number(source) if from_card else 0
            if known:
                is_guess = from_card and self.is_guessed(source)
                self.put(to, self._on_host(source).expand(to.shape), guess=is_guess, in_place=True)
            else:
                self.dropped(address_of(to))
                if law:
                    self._derive_law("aten::copy_", [law], to.numel(), to)
        elif from_card and known:
            if self.is_guessed(source):
                self._session.stand_ins.remember(_dtype(source), source.numel())
            to.copy_(self.host_view(source).expand(to.shape))
        elif from_card:
            placeholder = self._session.stand_ins.read(_dtype(source) or str(source.dtype), source.numel())
            self._fill_host(to, placeholder)
        return result

    def _fill_host(self, to: Any, placeholder: Any) -> None:
        """Fill a host tensor that unknown values were copied to; large ones become zero.

        So the weights of a checkpoint cost no disk where they are saved, and the largest ones no memory.
        """
        size = to.numel() * to.element_size()
        if size < LARGE_BYTES:
            to.fill_(placeholder)
        elif size < FRESH_BYTES or not to.is_contiguous():
            to.zero_()

    def _equal(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Compare two tensors: a tensor equals itself, and unknown values differ."""
        one, other = arguments[0], arguments[1]
        call()
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one is other or not one.numel():
            return True
        if not self.is_known(one) or not self.is_known(other):
            return bool(self._session.stand_ins.read("Bool", -1))
        return bool((self.host_view(one) == self.host_view(other)).all())

    def _close(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Compare two tensors with a tolerance: unknown ones pass torch's own checks in the backward pass."""
        result = call()
        in_backward = self._torch._C._current_graph_task_id() != -1
        return result or (in_backward and not all(map(self.is_known, arguments[:2])))

    # Sizes that depend on values: torch's code reads them back, and gets the number from here

    def _told_call(self, call: Run, *numbers: int) -> Any:
        """Run torch's code and let it read these numbers: some versions read a scalar, others copy it themselves."""
        self._told = list(numbers)
        self._session.core.tn_tell(len(numbers), (ctypes.c_int64 * len(numbers))(*numbers))
        result = call()
        self._told = []
        return result

    def _assumed(self, name: str, tensor: Any, if_unknown: str, if_known: str) -> Law | None:
        """Return the law of the tensor, if any, and note the assumption that follows."""
        law = self._session.laws.of(self._law_number(tensor))
        self._session.stand_ins.assume(name, if_unknown if law is None else if_known)
        self._session.stand_ins.size(name, tensor.numel())
        return law

    def _nonzero(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        mask, found = arguments[0], None
        if self.is_known(mask):
            held = without_repeats(self.host_view(mask))
            count = int(held.count_nonzero()) * (mask.numel() // max(held.numel(), 1))
            if count * mask.dim() <= MOST_INTEGERS:
                found = self.host_view(mask).nonzero()
        else:
            law = self._assumed("nonzero", mask, _ALL_TRUE, _SHARE)
            count = mask.numel() if law is None else as_mask(law).count(mask.numel())
            if count == mask.numel() and count * mask.dim() <= MOST_INTEGERS:
                found = self._plain.ones(mask.shape, dtype=self._torch.bool, device="cpu").nonzero()
        result = self._told_call(call, count)
        if found is not None:
            self.put(result, found, fresh=True)
        return result

    def _checked(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run an operator whose own check reads a flag, which holds for values that are not known."""
        checked = [tensor for tensor in self._tensors(arguments) if tensor.is_cuda]
        if not checked or all(self._mirror(tensor) is not None for tensor in checked):
            return call()
        self._told = [True] * _MOST_CHECKS
        try:
            return call()
        finally:
            self._told = []

    def _histogram(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run a histogram without given bounds, which torch reads from the card: any two will do."""
        self._told = [0.0, 1.0]
        result = call()
        self._told = []
        return result

    def _unique(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        tensor, name = arguments[0], _name(operator)
        # Torch counts the true elements of a mask instead of its distinct ones.
        counts_true = tensor.dtype == self._torch.bool and name in ("_unique", "_unique2")
        if self.is_known(tensor):
            values = operator(*self._host_copy(arguments), **keywords)
            count = int(self.host_view(tensor).count_nonzero()) if counts_true else _length(values[0])
            result = self._told_call(call, count)
            for made, value in zip(result, values, strict=True):
                if made is not None and value is not None and made.numel() == value.numel():
                    self.put(made, value, fresh=True)
            return result
        dim = None if name in ("_unique", "_unique2") else _argument(operator, arguments, keywords, "dim")
        elements = tensor.numel() if dim is None else tensor.shape[dim]
        law = self._assumed(name, tensor, _DISTINCT, _EXPECTED)
        if not counts_true:
            return self._told_call(call, distinct_values(law, elements))
        count = elements // 2 if law is None else as_mask(law).count(elements)
        result = self._told_call(call, count)
        if elements:
            there = [value for value, occurs in ((False, count < elements), (True, count > 0)) if occurs]
            self.put(result[0], self._plain.tensor(there, device="cpu"), fresh=True)
        return result

    def _contained(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run `isin`: nothing is in an empty set."""
        result = self._evaluated(operator, call, arguments, keywords)
        if isinstance(arguments[1], self._torch.Tensor) and not arguments[1].numel():
            self._put_number(result, bool(_argument(operator, arguments, keywords, "invert")))
        return result

    def _coalesced(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        indices, found = arguments[0]._indices(), None
        if indices.shape[1] < 2:  # torch does not read these
            return call()
        sizes = arguments[0].shape[: indices.shape[0]]
        if self.is_known(indices):
            strides = self._plain.tensor([math.prod(sizes[at + 1 :]) for at in range(len(sizes))], device="cpu")
            flat = (self.host_view(indices).T.long() @ strides).unique()
            found = self._torch.stack(self._torch.unravel_index(flat, sizes))
            count = len(flat)
        else:
            law = self._assumed("coalesce", indices, _DISTINCT, _EXPECTED)
            count = min(distinct_values(law, indices.shape[1]), math.prod(sizes))
        result = self._told_call(call, count)
        if found is not None:
            self.put(result._indices(), found, fresh=True)
        return result

    def _collective(self, operator: Any, call: Run, arguments: Sequence[Any], keywords: Keywords) -> Any:
        """Run a collective: in a group of one the outputs are the inputs; of larger groups the results are unknown."""
        written, read = (list(self._tensors([argument])) for argument in arguments[:2])
        result = call()
        group = self._torch.distributed.ProcessGroup.unbox(arguments[2])
        for to, source in zip(written, read, strict=False):
            if group.size() == 1 and self.is_known(source):
                self.put(to, self.host_view(source))
            else:
                self.forget(to)
        return result


def _is_write(name: str) -> bool:
    """Whether an operator of this name writes the values of a tensor, in place or with `out=`."""
    packet, _, overload = name.partition(".")
    # The kernel of `2 ** x` calls pow.Tensor_Tensor_out with a number on the card, which cannot be passed to Python.
    return (packet.endswith("_") or "out" in overload) and packet not in ("resize_", "set_", "pow")


def _written(operator: Any, arguments: Sequence[Any], keywords: Keywords) -> Iterator[Any]:
    """List the arguments that the operator writes."""
    for at, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield arguments[at] if at < len(arguments) else keywords.get(argument.name)


@cache
def _name(operator: Any) -> str:
    """Return an operator's name without the overload, such as "add_"."""
    return str(operator._schema.name.removeprefix("aten::"))


def _dtype(tensor: Any) -> str:
    """Return the dtype by ATen's name, such as "Float"; "" for rare ones."""
    return _NAMES.get(str(tensor.dtype).removeprefix("torch."), "")


def _argument(operator: Any, arguments: Sequence[Any], keywords: Keywords, name: str) -> Any:
    """Return an argument given by position, by name, or by default; None if the operator has none of this name."""
    for at, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            return arguments[at] if at < len(arguments) else keywords.get(name, argument.default_value)
    return None


def _length(tensor: Any) -> int:
    return int(tensor.shape[0]) if tensor.dim() else 1


def _expected(name: str, operand: Any, number: float | None) -> bool | None:
    """Return the result of a question about ordinary numbers, or of comparing them with a number, if it is clear."""
    if name in ("isnan", "isposinf", "isneginf", "isinf"):
        return False
    if number is None:
        return None
    if not operand.is_floating_point() and not operand.is_complex():
        # Lengths, counts and indices, which repeat_interleave and losses check against their bounds.
        if name == "ge" and number == 0:
            return True
        if name == "lt" and operand.dim() == 0 and isinstance(number, int) and number > 0:
            return True
    if name in ("eq", "ne") and isinstance(number, float) and math.isinf(number):
        return name == "ne"
    return None


def _quietly(operator: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Run the operator on the host; return None if it does not support these types there."""
    keywords = {name: value for name, value in keywords.items() if name not in ("device", "pin_memory", "out")}
    try:
        return operator(*arguments, **keywords)
    except (RuntimeError, NotImplementedError, IndexError):
        return None
