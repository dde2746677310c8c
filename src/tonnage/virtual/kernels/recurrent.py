"""Recurrent networks: cuDNN's (one call for all layers and steps) and PyTorch's fused cells.

`library_sizes` has the sizes of cuDNN's buffers.
"""

from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tonnage.ledger import Category
from tonnage.virtual.kernels.library_sizes import KINDS, RecurrentNetwork, dropout_state_bytes
from tonnage.virtual.kernels.registry import kernel, own_operator, scratch
from tonnage.virtual.session import Session, active

Maybe: TypeAlias = "Tensor | None"
Ints: TypeAlias = list[int]
_dropout_states: WeakKeyDictionary[Session, Tensor] = WeakKeyDictionary()


def _network(
    input: Tensor, mode: int, hidden: int, projected: int, layers: int, dropout: float, train: bool, bidirectional:
    bool, batch_sizes: Ints,
) -> RecurrentNetwork:  # fmt: skip
    """Describe a network by its time-major input; a packed input is a matrix with one row per element of each sequence."""
    packed = bool(batch_sizes)
    return RecurrentNetwork(
        kind=KINDS[mode], input=input.shape[-1], hidden=hidden, layers=layers, directions=2 if bidirectional else 1,
        steps=len(batch_sizes) if packed else input.shape[0], batch=batch_sizes[0] if packed else input.shape[1],
        element_bytes=input.element_size(), dtype=str(input.dtype).removeprefix("torch."), training=train,
        dropout=dropout > 0 and train, projected=projected, rows=input.shape[0] if packed else 0,
    )  # fmt: skip


@own_operator(
    "cudnn_rnn(int mode, Tensor input, Tensor? batch_sizes, Tensor hx, Tensor? cx, Tensor[] weights, bool biases, "
    "int layers, float dropout, bool train, bool bidirectional, bool batch_first) -> (Tensor, Tensor, Tensor)",
    composite=True,
)
def cudnn_rnn(
    mode: int, input: Tensor, batch_sizes: Maybe, hx: Tensor, cx: Maybe, weights: list[Tensor], biases: bool, layers:
    int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run PyTorch's `lstm`, `gru` or `rnn_*`: find the flat weight buffer, if any, and the dropout state; call cuDNN."""
    was_autocast = torch.is_autocast_enabled("cuda")
    hidden = (hx if cx is None else cx).shape[2]
    projected = hx.shape[2] if hidden != hx.shape[2] else 0
    per_layer = (4 if biases else 2) + bool(projected)
    sizes = batch_sizes.tolist() if batch_sizes is not None else []
    session, state = active(), None
    if dropout > 0 and train:
        if session not in _dropout_states:
            torch.empty((), dtype=torch.int64, device=input.device)  # the seed
            _dropout_states[session] = torch.ops.aten._cudnn_init_dropout_state(
                0.5, True, 0, dtype=torch.uint8, device=input.device
            )
        state = _dropout_states[session]
    # The buffer that all weights are views of; none if they are separate tensors.
    first, buffer = weights[0].detach(), None
    storage = first.untyped_storage()
    if len(weights) > 1 and all(w.untyped_storage().data_ptr() == storage.data_ptr() for w in weights):
        buffer = first.as_strided((storage.nbytes() // first.element_size(),), (1,), 0)
    with torch.autocast("cuda", enabled=False):
        if was_autocast:
            if weights[0].dtype not in (torch.half, torch.double):
                network = _network(input.new_empty((0, 0, input.shape[-1])), mode, hidden, projected, layers, 0, False,
                                   bidirectional, [])  # fmt: skip
                buffer, weights = _half_weights(network, weights)
            input, hx, cx = _half(input), _half(hx), _half(cx)
        output, hy, cy, _, _ = torch.ops.aten._cudnn_rnn(
            input, weights, per_layer, buffer, hx, cx, mode, hidden, projected, layers, batch_first, dropout, train,
            bidirectional, sizes, state,
        )  # fmt: skip
    return output, hy, cy


def _half_weights(network: RecurrentNetwork, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copy the weights as autocast does: to views of one new buffer, in FP16 even where BF16 was requested.

    The views are independent tensors, so each weight has its own gradient.
    """
    flat = torch.zeros(network.weight_elements, dtype=torch.half, device=weights[0].device)
    copies = [flat.new_empty(0).set_(view.detach()) for view in _views(flat, weights)]  # type: ignore[call-overload]
    for copy, weight in zip(copies, weights, strict=True):
        copy.copy_(weight)
    return flat, copies


def _half(tensor: Any) -> Any:
    eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.double
    return tensor.to(torch.half) if eligible else tensor


@kernel("_cudnn_init_dropout_state")
def init_dropout_state(*_: Any, device: torch.device | None = None, **__: Any) -> Tensor:
    """Allocate the dropout state, which is kept for the rest of the run."""
    size = dropout_state_bytes(active().gpu.sm_count, active().gpu.max_threads_per_sm)
    states = torch.empty(size, dtype=torch.uint8, device=device or "cuda")
    active().device.categorise(Category.WORKSPACE, [states.data_ptr()], None)
    return states


@kernel("_cudnn_rnn_flatten_weight")
def flatten_weight(
    weight_arr: list[Tensor], weight_stride0: int, input_size: int, mode: int, hidden_size: int, proj_size: int,
    num_layers: int, batch_first: bool, bidirectional: bool,
) -> Tensor:  # fmt: skip
    """`flatten_parameters`: allocate one buffer and make every weight a view of it."""
    shape_of_input = weight_arr[0].new_empty((0, 0, input_size))
    network = _network(shape_of_input, mode, hidden_size, proj_size, num_layers, 0, False, bidirectional, [])
    buffer = torch.empty(network.weight_elements, dtype=weight_arr[0].dtype, device=weight_arr[0].device)
    for weight, view in zip(weight_arr, _views(buffer, weight_arr), strict=True):
        weight.set_(view)  # type: ignore[call-overload]
    return buffer


def _views(buffer: Tensor, weights: list[Tensor]) -> list[Tensor]:
    parts = buffer[: sum(weight.numel() for weight in weights)].split([weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


@kernel("_cudnn_rnn")
def rnn_forward(
    input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Maybe, hx: Tensor, cx: Maybe, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool, bidirectional:
    bool, batch_sizes: Ints, dropout_state: Maybe,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Allocate a contiguous input, outputs, weights in one buffer, workspace and, in training, the reserve space."""
    active().device.use("cudnn")
    turned = batch_first and not batch_sizes
    x = (input.transpose(0, 1) if turned else input).contiguous()
    network = _network(x, mode, hidden_size, proj_size, num_layers, dropout, train, bidirectional, batch_sizes)
    output = x.new_empty((*x.shape[:-1], network.output * network.directions))
    hy = torch.empty_like(hx)
    cy = torch.empty_like(cx) if cx is not None else hx.new_empty(0)
    buffer = weight_buf if weight_buf is not None else x.new_empty(network.weight_elements)
    workspace = scratch(network.workspace_bytes(), x)
    reserve = torch.empty(network.reserve_bytes() if train else 0, dtype=torch.uint8, device=x.device)
    del workspace, x
    return output.transpose(0, 1) if turned else output, hy, cy, reserve, buffer


@kernel("_cudnn_rnn_backward")
def rnn_backward(
    input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Tensor, hx: Tensor, cx: Maybe, output: Tensor,
    grad_output: Maybe, grad_hy: Maybe, grad_cy: Maybe, mode: int, hidden_size: int, proj_size: int, num_layers: int,
    batch_first: bool, dropout: float, train: bool, bidirectional: bool, batch_sizes: Ints, dropout_state: Maybe,
    reserve: Tensor, output_mask: list[bool],
) -> tuple[Maybe, Maybe, Maybe, list[Tensor]]:  # fmt: skip
    """Allocate gradients of input and states, always, then those of the weights, as views of one buffer."""
    if grad_output is None and grad_hy is None and grad_cy is None:
        return None, None, None, []
    turned = batch_first and not batch_sizes
    seen = input.transpose(0, 1) if turned else input
    network = _network(seen, mode, hidden_size, proj_size, num_layers, dropout, train, bidirectional, batch_sizes)
    incoming = grad_output if grad_output is not None else output.new_empty(output.shape)
    last_h = grad_hy if grad_hy is not None else torch.empty_like(hx)
    last_c = grad_cy if grad_cy is not None or cx is None else torch.empty_like(cx)
    # The gradients of input and states.
    x = seen.contiguous()
    laid = (incoming.transpose(0, 1) if turned else incoming).contiguous()
    to_input = torch.empty(seen.shape, dtype=seen.dtype, device=seen.device)
    laid_h, laid_c = last_h.contiguous(), last_c.contiguous() if last_c is not None else None
    to_hx = torch.empty_like(hx)
    to_cx = torch.empty_like(cx) if cx is not None else None
    scratch(network.workspace_bytes(), x)
    del laid_c, laid_h, laid, x
    # Those of the weights: views of one buffer with biases, copies without.
    to_weights: list[Tensor] = []
    if output_mask[3]:
        x = seen.contiguous()
        buffer = torch.empty_like(weight_buf)
        workspace = scratch(network.workspace_bytes(), x)
        to_weights = _views(buffer, weight) if weight_stride0 >= 4 else [torch.empty_like(each) for each in weight]
        del workspace, buffer, x
    del last_c, last_h, incoming
    kept = [each if wanted else None for each, wanted in zip((to_hx, to_cx), output_mask[1:3], strict=True)]
    shown = to_input.transpose(0, 1) if turned else to_input
    return shown if output_mask[0] else None, kept[0], kept[1], to_weights


@kernel("_thnn_fused_gru_cell")
def gru_cell(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *_: Maybe) -> tuple[Tensor, Tensor]:
    """Allocate five rows of gates for the backward pass, then the new state."""
    workspace = hx.new_empty((hx.shape[0], hx.shape[1] * 5))
    return torch.empty_like(hx), workspace


@kernel("_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Maybe, Maybe]:
    """Allocate gradients of both sets of gates and of the state; biases are summed over the batch."""
    gates = workspace.shape[1] // 5 * 3
    to_input = workspace.new_empty((workspace.shape[0], gates))
    to_hidden = torch.empty_like(to_input)
    to_hx = torch.empty_like(grad_hy)
    biases = (to_input.sum(0), to_hidden.sum(0)) if has_bias else (None, None)
    return to_input, to_hidden, to_hx, *biases


@kernel("_thnn_fused_lstm_cell")
def lstm_cell(input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *_: Maybe) -> tuple[Tensor, Tensor, Tensor]:
    workspace = torch.empty_like(input_gates)
    hy, cy = torch.empty_like(cx), torch.empty_like(cx)
    return hy, cy, workspace
