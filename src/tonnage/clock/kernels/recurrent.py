"""The time of cuDNN's recurrent layers: a large product for all inputs of a layer, then a small one per time step.

The small products depend on each other, so their latency matters more than their arithmetic. A launch has the shape
(layers, length, batch, input width, hidden width, gates); directions count as layers. Products are modelled as in
`matmul`.
"""

from functools import lru_cache, partial
from math import prod
from typing import Any

from tonnage.clock.kernels.figures import arithmetic, careful, figures, on_card
from tonnage.clock.kernels.matmul import tiled
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall
from tonnage.hardware.gpu import Gpu

_GATES = {"0": 1, "1": 1, "2": 4, "3": 3}  # by cuDNN's mode: two plain ones, LSTM, GRU
_PASSES = {"forward": 1, "backward": 2}
_KERNELS = {"forward": 2, "backward": 3}  # per layer and time step


def _read(call: OperatorCall, settings: Settings, *, direction: str, mode_at: int) -> Launch | None:
    precision = arithmetic(call, 0, settings.tf32_convolution)
    given, (layers, batch, hidden), cells = call.shapes[0], call.shapes[4], call.shapes[5]
    if precision is None or len(given) != 3 or not prod(given):
        return None
    length, width = prod(given[:2]) // batch, given[2]
    gates = _GATES.get(call.value(mode_at), 4 if cells else 3)
    macs = batch * length * gates * hidden * (width + (layers - 1) * hidden + layers * hidden)
    weights = gates * hidden * (width + (2 * layers - 1) * hidden)
    moved = weights * length + batch * length * (width + 2 * layers * (gates + 1) * hidden)
    return Launch(
        kind="recurrent", name=call.name, shape=(layers, length, batch, width, hidden, gates), precision=precision,
        moved_bytes=float(moved * call.element_bytes(0) * _PASSES[direction]),
        operations=2.0 * macs * _PASSES[direction], variant=direction, kernels=layers * (_KERNELS[direction] * length + 1),
    )  # fmt: skip


OPERATORS = careful(
    {
        "_cudnn_rnn": partial(_read, direction="forward", mode_at=6),
        "_cudnn_rnn_backward": partial(_read, direction="backward", mode_at=10),
    }
)


@lru_cache(maxsize=1 << 16)
def seconds(launch: Launch, gpu: Gpu) -> Any:
    """Return the seconds of all kernels of all layers."""
    launch = on_card(launch, gpu)
    layers, length, batch, width, hidden, gates = launch.shape
    family = figures()["recurrent"][family_of(launch)]
    backward = launch.variant == "backward"
    # Each time step: a product with the hidden state, then the gates.
    moment = (1, batch, hidden, gates * hidden) if backward else (1, batch, gates * hidden, hidden)
    moment_s = family["moment"] * _product_s(launch, gpu, moment) + family["gates_s"]
    at_once = 1 + family["overlap"] * (layers - 1)  # layers overlap
    whole_s = family["start_s"] + layers / at_once * length * moment_s
    # For all time steps at once: the inputs, and backward the gradients of inputs and weights.
    rows = batch * length
    for inner in [width] + [hidden] * (layers - 1):
        wide = gates * hidden
        products = [(1, rows, inner, wide), (1, wide, inner, rows), (1, wide, hidden, rows)]
        products = products if backward else [(1, rows, wide, inner)]
        whole_s += family["large"] * sum(_product_s(launch, gpu, product) for product in products)
    return float(whole_s)


modelled = seconds.__wrapped__  # without the cache


def family_of(launch: Launch) -> str:
    """Return the name of the fitted figures."""
    small = launch.shape[4] <= figures()["recurrent"]["small_width"]
    return f"small-{launch.variant}" if small else launch.variant


def _product_s(launch: Launch, gpu: Gpu, shape: tuple[int, ...]) -> float:
    family = figures()["matmul"][figures()["family"][launch.precision]]
    element_bytes: int = figures()["element_bytes"][launch.precision]
    return float(tiled(family, shape, gpu, launch.precision, element_bytes, element_bytes))
