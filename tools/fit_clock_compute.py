"""Fit the figures of the compute kernels to measured times, and say how well they tell times that they were not fitted to.

    python tools/fit_clock_compute.py [--only matmul,attention] [--rounds 40]     # fits, writes data/compute.toml, reports
    python tools/fit_clock_compute.py --report [--worst 10]                       # reports only

Half of the measured kernels are fitted, the other half judges. Trainings help with the fit where they are not judged by; what
the trace of a step does not say (layouts, options) is told from the names of kernels and from the model that was trained.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tonnage.clock.kernels import attention, convolution, matmul, recurrent
from tonnage.clock.kernels.figures import figures
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware import find_gpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "src" / "tonnage" / "clock" / "data" / "compute.toml"
MODULES = {"matmul": matmul, "attention": attention, "convolution": convolution, "recurrent": recurrent}
TYPES = {"bfloat16": "c10::BFloat16", "float16": "c10::Half", "float32": "float", "float8_e4m3fn": "c10::Float8_e4m3fn"}
GPU = find_gpu("h200")


@dataclass(frozen=True)
class Case:
    """A launch and how long it took on the card; `calls` of them, where a training had more."""

    launch: Launch
    seconds: float
    judged: bool
    training: str = ""
    calls: int = 1

    @property
    def module(self) -> ModuleType:
        return MODULES[self.launch.kind]


# Measured kernels -----------------------------------------------------------------------------------------------------


def probed() -> Iterator[Case]:
    """Rows of the probe, those of a case on the same side. Every other case of a kind judges."""
    counts: dict[str, int] = defaultdict(int)
    with gzip.open(RESULTS / "times-h200.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file][1:]
    for row in rows:
        make = _MAKERS.get(row.get("kind", ""))
        if make is None or "gpu_s" not in row:
            continue
        backward = row["op"].endswith(" backward")
        counts[row["kind"]] += not backward
        made = make(row, backward)
        launch = made and launch_of(*made)
        if launch:
            yield Case(launch, row["gpu_s"], judged=counts[row["kind"]] % 2 == 0)


def launch_of(call: OperatorCall, settings: Settings) -> Launch | None:
    for module in MODULES.values():
        if call.name in module.OPERATORS:
            found: Launch | None = module.OPERATORS[call.name](call, settings)
            return found
    return None


def _call(
    name: str, tensors: Sequence[dict[str, Any] | None], values: dict[int, str], length: int = 20
) -> OperatorCall:
    shapes, strides, types = [()] * length, [()] * length, [""] * length
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            shapes[place], types[place] = tuple(tensor["shape"]), TYPES[tensor["dtype"]]
            strides[place] = tuple(tensor.get("stride", _dense(tensor["shape"])))
    texts = tuple(values.get(place, "") for place in range(length))
    return OperatorCall(name=name, shapes=tuple(shapes), strides=tuple(strides), types=tuple(types), values=texts)


def _dense(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return strides[-len(shape) :] if shape else []


def _made_product(row: dict[str, Any], backward: bool) -> tuple[OperatorCall, Settings]:
    tensors = [argument for argument in row["args"] if "shape" in argument]
    return _call(row["op"], tensors, {}), Settings(tf32_matmul="tf32" in row["note"])


def _made_attention(row: dict[str, Any], backward: bool) -> tuple[OperatorCall, Settings] | None:
    """By the operator that torch chooses: cuDNN's for halves, unless a mask's rows are odd or heads are wide."""
    query, key, value, *rest = row["args"]
    options = rest[0] if rest else {}
    mask, wide = options.get("attn_mask"), query["dtype"] == "float32"
    if wide and query["shape"][1] != key["shape"][1]:
        return None  # spelled out, operator by operator
    odd = mask is not None and (key["shape"][2] % 2 == 1 or query["shape"][3] > 128)
    library = "efficient" if wide or odd else "cudnn"
    name = f"_{library}_attention_{'backward' if backward else 'forward'}"
    if library == "efficient":
        query, key, value = (
            tensor | {"shape": [tensor["shape"][axis] for axis in (0, 2, 1, 3)]} for tensor in (query, key, value)
        )
    table = figures()["attention_operators"][name]
    tensors: list[dict[str, Any] | None] = [None] * 12
    tensors[table["query"] : table["query"] + 3] = query, key, value
    tensors[table["bias"]] = mask
    return _call(
        name, tensors, {table["causal"]: str(bool(options.get("is_causal"))), table["dropout"]: "0.0"}
    ), Settings()


def _made_convolution(row: dict[str, Any], backward: bool) -> tuple[OperatorCall, Settings]:
    image, weight, options = row["args"]
    side = (image["shape"][2] + 2 * options["padding"] - weight["shape"][2]) // options["stride"] + 1
    settings = Settings(tf32_convolution=row["note"] == "tf32")
    if backward:
        result = image | {"shape": [image["shape"][0], weight["shape"][0], side, side]}
        result.pop("stride", None)
        return _call("convolution_backward", [result, image, weight], {7: "False", 10: "[True, True, False]"}), settings
    texts = {2: [options["padding"]] * 2, 3: [options["stride"]] * 2, 4: [1, 1], 5: options["groups"]}
    return _call("cudnn_convolution", [image, weight], {at: str(text) for at, text in texts.items()}), settings


def _made_recurrent(row: dict[str, Any], backward: bool) -> tuple[OperatorCall, Settings]:
    kind, (_, hidden, layers) = row["op"].split()[0], map(int, row["note"].split())
    given = row["args"][1]
    state = {"shape": [layers, given["shape"][0], hidden], "dtype": "float32"}
    tensors = [given, None, None, given, state, state if kind == "LSTM" else None]
    return _call(f"_cudnn_rnn{'_backward' * backward}", tensors, {}, 22), Settings()


_MAKERS: dict[str, Callable[[dict[str, Any], bool], tuple[OperatorCall, Settings] | None]] = {
    "matmul": _made_product, "matmul8": _made_product, "batched": _made_product, "attention": _made_attention,
    "convolutions": _made_convolution, "recurrent": _made_recurrent,
}  # fmt: skip

# Trainings ------------------------------------------------------------------------------------------------------------

ASIDE = ("Memset", "splitKreduce", "epilogue", "scal_kernel", "Memcpy", "nchwToNhwc", "nhwcToNchw", "philox", "reduce", "init_device",
         "convert_dq", "compute_dot", "prepare_", "AddPadding", "ReduceSplitK", "wgrad2d_c1_k1_nhwc_reduce", "split_k_kernel")  # fmt: skip
CAUSAL = (
    "gpt2", "gpt-neo", "llama", "qwen", "mixtral", "opt", "pythia", "gemma", "mistral", "olmo", "phi", "smollm", "bloom",
    "falcon", "stablelm", "granite", "starcoder2", "cohere",
)  # fmt: skip
TF32 = re.compile(r"tf32|_s1688gemm_[12]")
LAYOUT = re.compile(r"_([NT])([NT])[NT]$|_([nt])([nt])_(?:n_|align)")


def trained() -> Iterator[Case]:
    """Compute operators of the profiled steps, with all kernels that they launched."""
    judged = {
        name: row["judged"] or row.get("seen", False)
        for name, row in json.loads((RESULTS / "steps-h200.json").read_text("utf-8"))["trainings"].items()
    }
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with gzip.open(RESULTS / "steps-operators-h200.jsonl.gz", "rt") as file:
        for line in file:
            row = json.loads(line)
            name = row["op"].removeprefix("aten::")
            if any(name in module.OPERATORS for module in MODULES.values()):
                grouped[json.dumps([row["training"], name, row["shapes"], row["types"]])].append(row)
    results, forwards = _seen_convolutions(grouped)
    for key, all_rows in grouped.items():
        training, name, shapes, types = json.loads(key)
        for kernels, calls, seconds in _by_layout(all_rows, apart=name in matmul.OPERATORS):
            call = _step_call(training, name, shapes, types, kernels, results)
            allowed = "tf32" in training or any(TF32.search(kernel) for kernel in kernels)
            launch = call and launch_of(call, Settings(tf32_matmul=allowed))
            if launch:
                count = {"convolution": max(calls), "recurrent": 1}.get(launch.kind, sum(calls))
                if name == "convolution_backward":
                    alone = max(1, round(sum(calls) / launch.kernels))
                    count = forwards.get(json.dumps([training, shapes[1:3]]), alone)
                yield Case(launch, seconds / count, judged[training], training, count)


def _by_layout(rows: list[dict[str, Any]], apart: bool) -> Iterator[tuple[list[str], list[int], float]]:
    """Kernels, calls and seconds of an operator, apart for each layout; kernels on the side go with the others' calls."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    aside = [row for row in rows if any(word in row["kernel"] for word in ASIDE)]
    for row in rows:
        if row not in aside:
            found = LAYOUT.search(row["kernel"]) if apart else None
            groups[found[0][:3].lower() if found else ""].append(row)
    whole = sum(row["calls"] for group in groups.values() for row in group)
    for group in groups.values():
        calls = [row["calls"] for row in group]
        share = sum(row["gpu_s"] for row in aside) * sum(calls) / whole
        yield [row["kernel"] for row in [*group, *aside]], calls, sum(row["gpu_s"] for row in group) + share


def _seen_convolutions(grouped: dict[str, list[dict[str, Any]]]) -> tuple[dict[tuple[str, str], Any], dict[str, int]]:
    """Results by input and weight, which backward passes have, and how often each was called, which forward passes tell."""
    results: dict[tuple[str, str], Any] = {}
    forwards: dict[str, int] = {}
    for key, rows in grouped.items():
        training, name, shapes, _ = json.loads(key)
        if name == "convolution_backward":
            results[json.dumps(shapes[1]), json.dumps(shapes[2])] = shapes[0]
        elif name in convolution.OPERATORS:
            counts = [row["calls"] for row in rows if not any(word in row["kernel"] for word in ASIDE)]
            forwards[json.dumps([training, shapes[:2]])] = max(counts, default=1)
    return results, forwards


def _step_call(
    training: str, name: str, shapes: list[Any], types: list[str], kernels: list[str], results: dict[tuple[str, str], Any]
) -> OperatorCall | None:  # fmt: skip
    values, strides = [""] * len(shapes), [()] * len(shapes)
    if name in matmul.OPERATORS:
        found = next((match for kernel in kernels if (match := LAYOUT.search(kernel))), None)
        right, left = (letter.lower() for letter in found.groups() if letter) if found else ("n", "n")
        at = 1 if name in ("addmm", "baddbmm") else 0
        if name != "_grouped_mm":
            for place, letter in ((at, left), (at + 1, right)):
                strides[place] = (1, shapes[place][-2]) if letter == "t" else (shapes[place][-1], 1)
    elif name in attention.OPERATORS:
        table = figures()["attention_operators"][name]
        masked = "bias" in table and bool(shapes[table["bias"]])
        values[table["causal"]] = str(not masked and training.startswith(CAUSAL))
        dropped = any("philox" in kernel for kernel in kernels) or training.startswith(("gpt2", "bert"))
        values[table["dropout"]] = "0.1" if dropped else "0.0"
    elif name == "convolution_backward":
        transposed = shapes[1][1] != shapes[2][1] and shapes[1][1] == shapes[2][0] and shapes[0][2] > shapes[1][2]
        values[7], values[10] = str(transposed), f"[{shapes[1][1] > 4}, True, False]"
    elif name in convolution.OPERATORS and not _set_options(name, shapes, values, results):
        return None
    turned = any("nchwToNhwc" in kernel for kernel in kernels)
    if (
        name in convolution.OPERATORS
        and not turned
        and ("channels-last" in training or any("nhwc" in kernel for kernel in kernels))
    ):
        strides = [(1, 1, 1, 1)] * len(shapes)
    shapes = [tuple(shape) for shape in shapes]
    return OperatorCall(
        name=name, shapes=tuple(shapes), strides=tuple(strides), types=tuple(types), values=tuple(values)
    )


def _set_options(name: str, shapes: list[Any], values: list[str], results: dict[tuple[str, str], Any]) -> bool:
    """Padding and stride that lead from the input to the result that the backward pass was given."""
    table, (image, weight) = figures()["convolution_operators"][name], shapes[:2]
    result = results.get((json.dumps(image), json.dumps(weight)))
    if result is None:
        return False
    values[table["dilation"]], transposed = "[1, 1]", name.endswith("transpose")
    if "groups" in table:
        values[table["groups"]] = "1"
    for stride in (1, 2, 4, 14, 16):
        for padding in range(weight[2]):
            side = (
                (image[2] - 1) * stride - 2 * padding + weight[2]
                if transposed
                else (image[2] + 2 * padding - weight[2]) // stride + 1
            )
            if side == result[2]:
                values[table["stride"]], values[table["padding"]] = f"[{stride}, {stride}]", f"[{padding}, {padding}]"
                return True
    return False


# Fits -----------------------------------------------------------------------------------------------------------------

SPREAD = {"start_s": 0.3, "side_s": 0.5, "tile_s": 1.0, "block_s": 1.0, "dram": 0.2, "cache": 0.5, "join_s": 0.5, "odd_in": 0.5, "odd_out": 0.5, "nn": 0.3,
          "nt": 0.3, "mac": 0.4, "wide": 0.5, "overlap": 0.7}  # fmt: skip
MOST = {"mac": 0.95, "dram": 0.95, "convert": 0.95, "side": 0.95}  # no kernel is faster than the card
PRIOR = 0.15  # how much an assumed figure counts, in errors of one measurement


def families_of(launch: Launch) -> list[str]:
    if launch.kind == "convolution":
        return convolution.families_of(launch)
    return [MODULES[launch.kind].family_of(launch)]


def fit(kind: str, cases: list[Case], rounds: int) -> None:
    """One group of families after the other, those that are measured together at once."""
    from scipy.optimize import least_squares

    for group in _groups(kind, cases):
        chosen = [
            case
            for case in cases
            if case.launch.kind == kind and families_of(case.launch) and set(families_of(case.launch)) <= group
        ]
        tables = figures()[kind]
        names = [
            (family, name)
            for family in sorted(group)
            for name, value in tables[family].items()
            if isinstance(value, float)
        ]
        most = np.log([MOST.get(name, np.inf) for _, name in names])
        before = np.minimum(np.log([tables[family][name] for family, name in names]), most - 0.01)
        spread = np.array([SPREAD.get(name, 0.7) for _, name in names])
        # A training's launches are many: they weigh as much as they are counted once.
        measured = np.log([case.seconds for case in chosen])

        def errors(logs: Any) -> Any:
            for (family, name), value in zip(names, np.exp(logs), strict=True):
                tables[family][name] = float(value)
            found = np.log([case.module.modelled(case.launch, GPU) for case in chosen]) - measured
            return np.concatenate([found, PRIOR * (logs - before) / spread])

        solved = least_squares(
            errors, before, loss="soft_l1", f_scale=0.08, diff_step=3e-3, max_nfev=rounds, bounds=(-np.inf, most)
        )
        errors(solved.x)
        print(f"{kind}: {', '.join(sorted(group))}: {len(chosen)} rows, {len(names)} figures", flush=True)


def _groups(kind: str, cases: list[Case]) -> list[set[str]]:
    groups: list[set[str]] = []
    for case in cases:
        if case.launch.kind == kind:
            mine = set(families_of(case.launch))
            if not mine:
                continue
            joined = [group for group in groups if group & mine]
            groups = [group for group in groups if not group & mine] + [mine.union(*joined)]
    return groups


def write(kinds: Sequence[str]) -> None:
    """The figures into their file, line by line, so that what people wrote there stays."""
    lines, section = [], ""
    for line in FIGURES.read_text("utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        kind, _, family = section.partition(".")
        name = line.split(" = ")[0]
        value = figures().get(kind, {}).get(family, {}).get(name) if kind in kinds and family else None
        lines.append(f"{name} = {_text(value)}" if isinstance(value, float) else line)
    FIGURES.write_text("\n".join(lines) + "\n", "utf-8")


def _text(value: float) -> str:
    """TOML reads 1 as a whole number: a figure stays a fraction."""
    text = f"{value:.4g}"
    return text if "." in text or "e" in text else f"{text}.0"


# Reports --------------------------------------------------------------------------------------------------------------


def report(cases: list[Case], worst: int) -> None:
    print(f"\n{'kernels':34} {'half':8} {'rows':>5} {'median':>7} {'p90':>7} {'by time':>8} {'sum':>7}")
    tables: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if not case.training:
            aside = case.launch.variant.split()[1:2] if case.launch.kind in ("attention", "convolution") else []
            batched = ["batched"] if case.launch.kind == "matmul" and case.launch.shape[0] > 1 else []
            tables[" ".join([case.launch.kind, *batched, case.launch.precision, *aside])].append(case)
            tables[f"{case.launch.kind}, all"].append(case)
    for name, found in sorted(tables.items()):
        for judged in (False, True):
            print(
                f"{name:34} {'judged' if judged else 'fitted':8} {_scores([case for case in found if case.judged == judged])}"
            )
    for kind in MODULES:
        for judged in (False, True):
            sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
            for case in cases:
                if case.training and case.launch.kind == kind and case.judged == judged:
                    sums[case.training][0] += predicted(case) * case.calls
                    sums[case.training][1] += case.seconds * case.calls
            if sums:
                print(f"\n{kind} by training, {'judged' if judged else 'fitted'}: {_of_trainings(list(sums.values()))}")
                for name, (told, taken) in sums.items():
                    print(f"  {name:42} {1e3 * taken:9.2f} ms {told / taken - 1:+7.1%}")
    if worst:
        _worst([case for case in cases if not case.judged], worst)


def predicted(case: Case) -> float:
    seconds: float = case.module.seconds(case.launch, GPU)
    return seconds


def _scores(cases: list[Case]) -> str:
    if not cases:
        return "    0"
    taken = np.array([case.seconds for case in cases])
    told = np.array([predicted(case) for case in cases])
    errors = np.abs(told / taken - 1)
    by_time, whole = (errors * taken).sum() / taken.sum(), told.sum() / taken.sum() - 1
    return f"{len(cases):5} {np.median(errors):7.1%} {np.quantile(errors, 0.9):7.1%} {by_time:8.1%} {whole:+7.1%}"


def _of_trainings(sums: list[list[float]]) -> str:
    errors = [abs(told / taken - 1) for told, taken in sums]
    told, taken = (sum(column) for column in zip(*sums, strict=True))
    return f"median {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}, all {told / taken - 1:+.1%}"


def _worst(cases: list[Case], count: int) -> None:
    for kind in MODULES:
        print(f"\nworst of {kind}, fitted")
        found = sorted(
            (case for case in cases if case.launch.kind == kind),
            key=lambda case: -abs(np.log(predicted(case) / case.seconds)),
        )
        for case in found[:count]:
            launch = case.launch
            print(
                f"  {case.training:20} {launch.name} {launch.precision} {launch.shape} {launch.variant}: {1e6 * case.seconds:.1f} us, {1e6 * predicted(case):.1f} told"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODULES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--worst", type=int, default=0)
    options = parser.parse_args()
    kinds = options.only.split(",")
    cases = [case for case in [*probed(), *trained()] if case.launch.kind in kinds]
    if not options.report:
        for kind in kinds:
            fit(kind, [case for case in cases if not case.judged], options.rounds)
        write(kinds)
    report(cases, options.worst)
    return 0


if __name__ == "__main__":
    sys.exit(main())
