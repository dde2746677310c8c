"""Hold the virtual card against the CPU over PyTorch's own database of operators (OpInfo), in a virtual run:

    tonnage run --gpu h200 tools/operator_database.py [--only NAME ...] [--every 20]

Every operator with sample inputs is called in several types on the CPU and on the card. The card must not fail where the
CPU does not, in the backward pass either; it must return tensors of the same shapes, types and strides; and values that it
says it knows must be those of the CPU, also after writing in place.

A difference has an operator and a kind: "error", "results" (number, shape or type of the tensors), "strides", "values",
"in place" (the values of the tensor that was written) or "backward". tests/virtual/driver/operator_differences.toml lists
those that a real GPU has too.

It prints one line of JSON, because what a virtual run writes to files is not kept, and a summary to standard error.

What a real GPU returns is not known here: the CPU stands for it. Values that the card does not know are not compared.
"""

import argparse
import json
import sys
import time
import types
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

# The base class of torch's own test cases, none of which runs here.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase  # type: ignore[attr-defined]

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from tonnage.virtual.session import active  # noqa: E402

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
SAMPLES = 4
# What they draw is known on the card, and differs from what the CPU draws.
RANDOM = ("multinomial",)


@dataclass
class Comparison:
    """The differences of all calls so far."""

    calls: int = 0
    operators: set[str] = field(default_factory=set)
    differences: list[dict[str, Any]] = field(default_factory=list)

    def call(self, info: Any, dtype: torch.dtype, number: int, sample: Any) -> None:
        """Call the operator on the CPU and on the card, and add how they differ. What the CPU cannot do is no call."""
        try:
            with torch.random.fork_rng(devices=[]):
                expected = apply(info, sample, "cpu")
        except Exception:
            return
        self.calls += 1
        self.operators.add(name_of(info))
        row = {"operator": name_of(info), "dtype": str(dtype).removeprefix("torch."), "sample": number}
        for kind, detail in differences(info, dtype, number, sample, expected):
            self.differences.append({**row, "kind": kind, "detail": detail})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these operators")
    parser.add_argument("--every", type=int, metavar="N", help="each N-th operator (default: all, or those named)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    began_s = time.monotonic()
    comparison = Comparison()
    every = options.every or (0 if options.only else 1)
    for number, info in enumerate(op_db):
        is_chosen = name_of(info) in options.only or (every and number % every == 0)
        if not is_chosen:
            continue
        for dtype in DTYPES:
            # Samples are drawn from one generator, which must not depend on the operators before.
            torch.manual_seed(0)
            for index, sample in enumerate(samples_of(info, dtype)):
                comparison.call(info, dtype, index, sample)
    seconds = time.monotonic() - began_s
    figures = {
        "calls": comparison.calls,
        "operators": sorted(comparison.operators),
        "differences": comparison.differences,
        "seconds": seconds,
    }
    print(json.dumps(figures))
    differing = {row["operator"] for row in comparison.differences}
    print(
        f"{comparison.calls:,} calls of {len(comparison.operators)} operators in {seconds:.0f} s: "
        f"{len(comparison.differences)} differences of {len(differing)} operators",
        file=sys.stderr,
    )


def name_of(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def samples_of(info: Any, dtype: torch.dtype) -> list[Any]:
    """Return the first sample inputs of this type, on the CPU; none where a build of the operator lacks the type."""
    if dtype not in info.supported_dtypes("cpu") or dtype not in info.supported_dtypes("cuda"):
        return []
    try:
        samples = info.sample_inputs("cpu", dtype, requires_grad=dtype.is_floating_point and info.supports_autograd)
        return list(samples)[:SAMPLES]
    except Exception:
        return []


def apply(info: Any, sample: Any, device: str) -> Any:
    """Call the operator with fresh copies of its arguments on this device."""
    value, positional, keywords = copied((sample.input, sample.args, sample.kwargs), device)
    if "device" in keywords:
        keywords["device"] = device
    return info(value, *positional, **keywords)


def copied(values: Any, device: str) -> Any:
    """Copy tensors to the device with their strides and the whole of their storage, as leaves of their own."""

    def copy(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(device)
        if not isinstance(value, torch.Tensor):
            return value
        source = value.detach()
        if source.layout == torch.strided and source.device.type == "cpu" and not source.is_conj():
            elements = source.untyped_storage().nbytes() // source.element_size()
            storage = source.as_strided((elements,), (1,), 0).to(device, copy=True)
            made = storage.as_strided(source.shape, source.stride(), source.storage_offset())
        else:
            made = source.to(device, copy=True)
        return made.requires_grad_(value.requires_grad)

    return tree_map(copy, values)


def differences(info: Any, dtype: torch.dtype, number: int, sample: Any, expected: Any) -> Iterator[tuple[str, str]]:
    """List how the card differs from the CPU's result of one call: kind and detail of each difference."""
    try:
        result = apply(info, sample, "cuda")
    except Exception as error:
        yield "error", described(error)
        return
    expected_tensors, tensors = tensors_of(expected), tensors_of(result)
    mismatch = next(mismatches(expected_tensors, tensors), None)
    if mismatch is not None:
        yield mismatch
        if mismatch[0] == "results":
            return
    wrong = "" if info.name in RANDOM else wrong_values(expected_tensors, tensors)
    if wrong:
        yield "values", wrong
    if number == 0 and info.inplace_variant is not None:
        wrong = in_place(info, sample)
        if wrong:
            yield "in place", wrong
    if dtype.is_floating_point and info.supports_autograd:
        failure = backward_failure(tensors)
        if failure and not backward_failure(expected_tensors):
            yield "backward", failure


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def mismatches(expected: list[torch.Tensor], tensors: list[torch.Tensor]) -> Iterator[tuple[str, str]]:
    if len(expected) != len(tensors):
        yield "results", f"{len(tensors)} tensors, {len(expected)} on the CPU"
        return
    for wanted, tensor in zip(expected, tensors, strict=True):
        if wanted.shape != tensor.shape:
            yield "results", f"shape {tuple(tensor.shape)}, on the CPU {tuple(wanted.shape)}"
        if wanted.dtype != tensor.dtype:
            yield "results", f"{tensor.dtype}, on the CPU {wanted.dtype}"
    for wanted, tensor in zip(expected, tensors, strict=True):
        both_strided = wanted.layout == tensor.layout == torch.strided
        if both_strided and wanted.numel() and strides_that_matter(wanted) != strides_that_matter(tensor):
            yield "strides", f"{tensor.stride()} of {tuple(tensor.shape)}, on the CPU {wanted.stride()}"


def strides_that_matter(tensor: torch.Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def wrong_values(expected: list[torch.Tensor], tensors: list[torch.Tensor]) -> str:
    """Describe the first known values that are not those of the CPU."""
    for wanted, tensor in zip(expected, tensors, strict=True):
        if not tensor.is_cuda or tensor.layout != torch.strided or not tensor.numel() or not active().is_known(tensor):
            continue
        values = tensor.detach().cpu()
        if not torch.allclose(values, wanted.detach(), rtol=1e-2, atol=1e-5, equal_nan=True):
            return f"{values.flatten()[:4].tolist()}, on the CPU {wanted.flatten()[:4].tolist()}"
    return ""


def in_place(info: Any, sample: Any) -> str:
    """Write in place on both, where no version tells that a tensor was written, and describe wrong known values."""
    written = []
    with torch.inference_mode():
        for device in ("cpu", "cuda"):
            value, positional, keywords = copied((sample.input, sample.args, sample.kwargs), device)
            try:
                info.inplace_variant(value, *positional, **keywords)
            except Exception:
                return ""
            written.append([value] if isinstance(value, torch.Tensor) else list(value))
        return wrong_values(*written)


def backward_failure(tensors: list[torch.Tensor]) -> str:
    """Return what the backward pass of the sum of all magnitudes raises, if anything."""
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    if not leaves:
        return ""
    try:
        torch.stack([tensor.abs().sum().float() for tensor in leaves]).sum().backward()
    except Exception as error:
        return described(error)
    return ""


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


if __name__ == "__main__":
    main()
