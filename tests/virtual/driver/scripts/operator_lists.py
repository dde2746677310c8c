"""Calls every operator of data/values.toml on the virtual card and on the CPU, and prints the differences as JSON.

Each is called with values that the card knows and with values that it does not; with numbers of each type beside tensors,
with tensors of other types, without elements and without dimensions, in place and with `out=`.
"""

import json
import math
import tomllib
import warnings
from pathlib import Path

import torch

from tonnage import virtual
from tonnage.virtual.driver.unwritten import DERIVES, FILLS
from tonnage.virtual.session import active

warnings.filterwarnings("ignore")
LISTS = {
    kind: names.split()
    for kind, names in tomllib.loads((Path(virtual.__file__).parent / "data" / "values.toml").read_text()).items()
}
MATRIX = torch.tensor([[3, 1, 2, 0], [5, 7, 6, 4], [1, 1, 0, 2]])
TENSORS = {
    "int64": MATRIX,
    "float32": MATRIX / 2,
    "float16": (MATRIX / 2).half(),
    "bfloat16": (MATRIX / 4).bfloat16(),
    "uint8": MATRIX.byte(),
    "int32": MATRIX.int(),
    "bool": MATRIX > 1,
    "complex64": MATRIX + 1j,
    "empty": torch.zeros(0, 4),
    "no dimensions": torch.tensor(3.0),
    "no dimensions, integer": torch.tensor(2),
    "transposed": (MATRIX / 2).T,
    "expanded": torch.tensor([1, 2]).expand(3, 2),
}
# Of each kind, the first is combined with all of the other kind.
OTHERS = [2, -1, 300, 0, 2.5, math.inf, True, 1j, torch.tensor(2), torch.tensor(0.5), MATRIX, MATRIX / 3, MATRIX > 2]
COMMON_TENSORS = {"int64", "float32"}
COMMON_OTHERS = (2, 2.5, 1j)
ROW, INDICES, MASK, HALVES = torch.tensor([2, 0]), torch.tensor([[0, 2, 1, 1]]), MATRIX > 1, MATRIX / 2
# The arguments after the first of operators that are not called with a number or a tensor of the same shape.
ARGUMENTS = {
    "rsub.Scalar": [(2,), (2.5,)],
    "clamp": [(1, 3), (1,), (None, 2)],
    "clamp_": [(1, 3)],
    "clamp.Tensor": [(MATRIX, MATRIX + 1)],
    "where.self": [],
    "masked_fill.Scalar": [(MASK, 9)],
    "masked_fill_.Scalar": [(MASK, 9)],
    "masked_fill.Tensor": [(MASK, torch.tensor(9))],
    "masked_fill_.Tensor": [(MASK, torch.tensor(9))],
    "masked_select": [(MASK,)],
    "index.Tensor": [([ROW],), ([None, ROW],), ([MASK],)],
    "_unsafe_index.Tensor": [([ROW],)],
    "index_select": [(0, ROW), (1, ROW)],
    "gather": [(0, INDICES), (1, INDICES[:, :2])],
    "take": [(ROW,)],
    "embedding": [(ROW,)],
    "_index_put_impl_": [([ROW], MATRIX[:2]), ([torch.tensor([1, 1])], MATRIX[:2], True)],
    "index_copy_": [(0, ROW, MATRIX[:2])],
    "index_fill_.int_Scalar": [(0, ROW, 3)],
    "index_fill_.int_Tensor": [(0, ROW, torch.tensor(3))],
    "scatter.value": [(0, INDICES, 8)],
    "scatter_.value": [(0, INDICES, 8)],
    "scatter.src": [(0, INDICES, MATRIX)],
    "scatter_.src": [(0, INDICES, MATRIX)],
    "scatter_add": [(0, INDICES, MATRIX)],
    "scatter_add_": [(0, INDICES, MATRIX)],
    "sum.dim_IntList": [([0],), ([-1], True)],
    "prod.dim_int": [(0,)],
    "mean.dim": [([0],)],
    "any.dim": [(0,)],
    "all.dim": [(0,)],
    "amax": [([0],), ()],
    "amin": [([1],), ()],
    "max.dim": [(0,), (-1, True)],
    "min.dim": [(0,)],
    "cumsum": [(0,), (-1,)],
    "cumsum_": [(0,)],
    "cumprod": [(0,)],
    "count_nonzero.dim_IntList": [([0],), ([],)],
    "constant_pad_nd": [([1, 1], 0), ([1, 0, 0, 2], 3)],
    "flip": [([0],), ([0, 1],)],
    "roll": [([1], [0]), ([2],)],
    "tril": [(), (1,)],
    "triu": [(), (-1,)],
    "searchsorted.Tensor": [(HALVES,)],
    "topk": [(2,), (1, 0, False)],
    "argmax": [(), (0,), (-1, True)],
    "argmin": [(), (0,)],
    "sort": [(), (0, True)],
    "sort.stable": [()],
    "uniform_": [(0.0, 1.0), ()],
    "normal_": [(0.0, 1.0), ()],
    "random_": [()],
    "random_.from": [(2, 9), (0, None)],
    "random_.to": [(5,)],
    "bernoulli_.float": [(0.5,)],
    "div.Tensor_mode": [(torch.tensor(2),)],
    "div_.Tensor_mode": [(torch.tensor(2),)],
    "fill_.Scalar": [(2,), (0.5,), (True,)],
    "fill_.Tensor": [(torch.tensor(2),)],
}
KEYWORDS = {
    "_index_put_impl_": {},
    "sort.stable": {"stable": True},
    "div.Tensor_mode": {"rounding_mode": "floor"},
    "div_.Tensor_mode": {"rounding_mode": "trunc"},
}
# Operators whose first argument is not any tensor.
WHOLE_CALLS = {
    "where.self": [(MASK, MATRIX, MATRIX + 1), (MASK, HALVES, torch.tensor(0)), (MASK, MATRIX / 2, MATRIX)],
    "embedding": [(HALVES, ROW), (MATRIX, INDICES)],
    "bincount": [(ROW,), (ROW, None, 5), (torch.zeros(0, dtype=torch.int64),)],
    "cat": [([MATRIX, MATRIX],), ([MATRIX, MATRIX / 2], 1), ([torch.zeros(0), HALVES],)],
    "repeat_interleave.Tensor": [(ROW,), (torch.tensor([1, 3]),)],
    "searchsorted.Tensor": [(torch.tensor([1.0, 2.0, 4.0]), HALVES), (torch.tensor([1, 3]), torch.tensor(2))],
    "bucketize.Tensor": [(HALVES, torch.tensor([1.0, 2.0])), (MATRIX, torch.tensor([1, 2]))],
    "isin.Tensor_Tensor": [(MATRIX, ROW), (MATRIX, torch.zeros(0, dtype=torch.int64)), (torch.zeros(0), HALVES)],
    "isin.Tensor_Scalar": [(MATRIX, 2)],
    "arange.start_out": [],
    "eye.out": [],
    "eye.m_out": [],
    "_amp_update_scale_": [(torch.tensor(8.0), torch.tensor(0, dtype=torch.int32), torch.tensor(0.0), 2.0, 0.5, 2000)],
    "multinomial": [(torch.tensor([0.0, 1.0, 0.0]), 1), (torch.tensor([[0.0, 1.0]]), 3, True)],
    "bernoulli_.Tensor": [(HALVES, torch.tensor(0.5))],
}
RANDOM = {*LISTS["sampled"], "multinomial"}
# They have no counterpart on the CPU with the same arguments, or no result to compare.
CPU_LACKS = {"_amp_update_scale_"}


def main():
    problems, known_names = [], set()
    names = [name for name in listed() if exists(name)]
    missing = [name for name in [*listed(), *LISTS["overwritten"], *FILLS, *DERIVES] if not exists(name)]
    problems += [f"{name} is no operator with a kernel of its own" for name in missing]
    for name in names:
        for arguments in calls_of(name):
            for is_known in (True, False):
                try:
                    compare(name, arguments, is_known, known_names)
                except Exception as error:
                    problems.append(
                        f"{name}{shown(arguments)}, known: {is_known}: {type(error).__name__}: {error}"[:300]
                    )
    problems += written_over()
    never = sorted(name for name in set(names) - known_names - set(LISTS["sampled"]) if calls_of(name))
    print(json.dumps({"problems": problems, "never known": never}))


def listed():
    """List every operator of the data file, but those of `c10d`."""
    kinds = ("Tensor", "Scalar")
    names = [f"{name}{place}.{kind}" for name in LISTS["arithmetic"] for kind in kinds for place in ("", "_")]
    names += [f"{name}.{kind}" for name in LISTS["comparisons"] for kind in kinds]
    for key in ("evaluated", "flags", "sampled", "filled", "chosen"):
        names += LISTS[key]
    return names


def exists(name):
    """Whether torch has such an operator, which is not composed of others."""
    packet, _, overload = name.partition(".")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_there = (overload or "default") in getattr(torch.ops.aten, packet).overloads()
    return is_there and not has_kernel(f"aten::{name}", "CompositeImplicitAutograd")


def calls_of(name):
    """Return the argument lists that an operator is called with."""
    if name in WHOLE_CALLS:
        return WHOLE_CALLS[name]
    tensors = list(TENSORS.items())
    if name.partition(".")[0].endswith("_") and name not in ("zero_", "fill_.Scalar"):
        tensors = [(kind, tensor) for kind, tensor in tensors if kind != "expanded"]  # torch forbids it
    if name in ARGUMENTS:
        return [(tensor, *arguments) for _, tensor in tensors for arguments in ARGUMENTS[name]]
    required = [argument for argument in operator_of(name)._schema.arguments if not argument.has_default_value()]
    if len(required) == 1:
        return [(tensor,) for _, tensor in tensors]
    takes_tensor = str(required[1].type) == "Tensor"
    others = [other for other in OTHERS if takes_tensor or not isinstance(other, torch.Tensor)]
    numbers = [other for other in others if not isinstance(other, torch.Tensor)]
    pairs = [(tensor, tensor) for _, tensor in tensors if takes_tensor]
    for kind, tensor in tensors:
        is_common = kind in COMMON_TENSORS
        pairs += [
            (tensor, other) for other in (others if is_common else numbers) if is_common or other in COMMON_OTHERS
        ]
    return pairs


def operator_of(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def call(name, arguments):
    """Call the operator; a number where it takes a tensor comes by way of the method."""
    operator, packet = operator_of(name), name.partition(".")[0]
    second = operator._schema.arguments[1] if len(arguments) > 1 else None
    if second is not None and str(second.type) == "Tensor" and not isinstance(arguments[1], torch.Tensor):
        return getattr(torch.Tensor, packet)(*arguments)
    return operator(*arguments, **KEYWORDS.get(name, {}))


def compare(name, arguments, is_known, known_names):
    """Call the operator on both devices and compare; what the CPU refuses is no call."""
    on_host = moved(arguments, "cpu", True)
    try:
        expected = tensors_of(call(name, on_host))
    except Exception:
        if name not in CPU_LACKS:
            return
        expected = None
    result = tensors_of(call(name, moved(arguments, "cuda", is_known)))
    for at, tensor in enumerate(result):
        known_there = active().is_known(tensor)
        if is_known and known_there and tensor.numel():
            known_names.add(name)
        if expected is None:
            continue
        wanted = expected[at]
        depends_on_values = not is_known and name in (
            "masked_select",
            "index.Tensor",
            "bincount",
            "repeat_interleave.Tensor",
        )
        assert depends_on_values or tensor.shape == wanted.shape, f"shape {tensor.shape}, on the CPU {wanted.shape}"
        assert tensor.dtype == wanted.dtype, f"{tensor.dtype}, on the CPU {wanted.dtype}"
        if is_known and known_there and name not in LISTS["sampled"]:
            values = tensor.cpu()
            assert torch.allclose(values, wanted, equal_nan=True), f"{values.tolist()}, on the CPU {wanted.tolist()}"


def moved(value, device, is_known):
    """Copy tensors to a device, where their values are known or not; indices and masks are always known."""
    if isinstance(value, (list, tuple)):
        return type(value)(moved(each, device, is_known) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value is TENSORS["expanded"]:
        return moved(value[0], device, is_known).expand(value.shape)
    if device == "cpu":
        return value.clone()
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    made.copy_(value)
    if not is_known and value is not ROW and value is not INDICES:
        active().forget(made)
    return made


def tensors_of(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [value for value in result or () if isinstance(value, torch.Tensor)]


def written_over():
    """Write over tensors whose values were known, and return those whose values are then taken for others."""
    problems = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            known, other = torch.arange(4, device="cuda"), torch.arange(4, device="cuda") + 1
            for name in ("add", "mul", "maximum", "bitwise_and", "remainder", "sub"):
                out = torch.zeros(4, dtype=torch.int64, device="cuda")
                getattr(torch, name)(known, other, out=out)
                expected = getattr(torch, name)(known.cpu(), other.cpu())
                if active().is_known(out) and out.tolist() != expected.tolist():
                    problems.append(f"{name} with out=, inference mode: {inference}: {out.tolist()}")
            for name in ("arange", "eye"):
                out = torch.zeros(3, device="cuda")
                getattr(torch, name)(3, out=out)
                if out.tolist() != getattr(torch, name)(3).tolist():
                    problems.append(f"{name} with out=: {out.tolist()}")
            problems += [f"{what}, inference mode: {inference}" for what in written_in_place()]
    return problems


def written_in_place():
    """Write in place with operators that are tracked, that call tracked ones and that are not tracked."""
    places = torch.tensor([1, 1, 3], device="cuda")
    ones = torch.ones(3, dtype=torch.int64, device="cuda")
    table = torch.zeros(4, dtype=torch.int64, device="cuda")
    table[2] = 5
    table[places] = 7
    table.index_put_((places,), ones, accumulate=True)
    table[table == 5] = 6
    if table.tolist() != [0, 9, 6, 8]:
        yield f"indices that are assigned to: {table.tolist()}"
    counts = torch.zeros(4, dtype=torch.int64, device="cuda")
    torch._foreach_add_([counts], 1)
    if active().is_known(counts) and counts.tolist() != [1] * 4:
        yield f"_foreach_add_: {counts.tolist()}"
    halves = torch.full((4,), 0.5, device="cuda")
    writes = {
        "sin_": lambda values: values.sin_(),
        "index_add": lambda values: values.index_add(0, places, ones.float()),
        "index_add_": lambda values: values.index_add_(0, places, ones.float()),
        "put": lambda values: values.put(places, ones.float()),
        "masked_scatter": lambda values: values.masked_scatter(values > 0, ones.float()),
        "lerp out": lambda values: torch.lerp(values, values, 0.5, out=values),
        "unfold backward": lambda values: torch.ops.aten.unfold_backward(values.view(2, 2), [3], 0, 2, 1),
    }
    for what, write in writes.items():
        if active().is_known(write(halves.clone())):
            yield f"{what}: the old values are taken for the new ones"


def shown(arguments):
    parts = [str(list(a.shape)) + str(a.dtype)[5:] if isinstance(a, torch.Tensor) else repr(a)[:40] for a in arguments]
    return f"({', '.join(parts)})"


if __name__ == "__main__":
    main()
