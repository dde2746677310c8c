"""Optimizer states in pinned host memory, as many as do not fit the GPU.

The first `gpu_bytes` of states stay. The others are stepped on the device through a staging area, or by a host
thread during backward; gradients are stepped as backward produces them unless they are clipped.
"""

from contextlib import ExitStack, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tonnage.errors import RequestError
from tonnage.fit.moving.host import HostMemoryExhausted
from tonnage.fit.stepping.backward_stepper import BackwardStepper
from tonnage.fit.stepping.host_step import DEVICE_SLOTS, DeviceStep, HostStep, PiecewiseStep, pieces_of
from tonnage.fit.stepping.parameter_step import gradient_norm, parameter_steps, why_not_in_pieces
from tonnage.fit.stepping.pieces import StatePiece, flat
from tonnage.fit.stepping.stepper import Stepper, trained_parameters
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training, Undo
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.hardware.host_memory import free_host_bytes
from tonnage.units import format_bytes


class HostGradientStepper(BackwardStepper):
    """Moves gradients off the device as backward produces them, and accumulates micro-batches on the host."""

    def __init__(self, model: nn.Module, before: Stepper, way: HostStep) -> None:
        super().__init__(model, before)
        self._way = way

    def gradient_is_there(self, parameter: nn.Parameter, *, last: bool) -> None:
        pieces = self._pieces(parameter)
        if (last and self.clip_norm is None) or any(piece.buffer is None for piece in pieces):
            super().gradient_is_there(parameter, last=last)
            return
        assert parameter.grad is not None
        self._way.add(parameter, parameter.grad, pieces)
        parameter.grad = None

    @torch.no_grad()
    def clip(self, clip_norm: float) -> None:
        self.steps.finish()
        on_host = [piece.gradient for piece in self._all_pieces() if piece.gradient is not None and piece.has_gradient]
        on_device = [p.grad for p in self.with_gradients() if p.grad is not None]
        norms = [gradient_norm(some).to("cpu", torch.float64) for some in (on_device, on_host) if some]
        if not norms:
            return
        self.gradient_norm = torch.linalg.vector_norm(torch.stack(norms))
        nn.utils.clip_grads_with_norm_(self.with_gradients(), clip_norm, self.gradient_norm)
        scale = torch.clamp(clip_norm / (self.gradient_norm + 1e-6), max=1.0)
        for gradient in on_host:
            gradient.mul_(scale)

    def step_gradients(self) -> None:
        for parameter in trained_parameters(self.optimizer):
            waiting = [piece for piece in self._pieces(parameter) if piece.has_gradient]
            with self.steps.at_hand(parameter) if waiting else nullcontext():
                for piece in waiting:
                    self._way.step_on_host(piece.of(flat(parameter)), None, piece, self.steps.group(parameter))
        super().step_gradients()

    def abandon(self) -> None:
        super().abandon()
        for piece in self._all_pieces():
            piece.has_gradient = False

    def _pieces(self, parameter: nn.Parameter) -> list[StatePiece]:
        return self._way.pieces(parameter, self.optimizer.state[parameter], self.steps.group(parameter))

    def _all_pieces(self) -> list[StatePiece]:
        return [piece for parameter in trained_parameters(self.optimizer) for piece in self._pieces(parameter)]


class HostStates(Technique, name="host-states"):
    gpu_bytes: int = 0  # of states that stay on the GPU
    how: str = "host"  # where host states are stepped: "host" or "device"
    gradients: str = "device"  # where micro-batches are accumulated: "device" or "host"
    piece_bytes: int = 64 * 2**20  # of states that are copied together
    window_bytes: int = 512 * 2**20  # of gradients that may wait for their states

    def __post_init__(self) -> None:
        if self.how not in ("host", "device") or self.gradients not in ("host", "device"):
            raise NotApplicable(
                f"States on the host were asked for with how={self.how!r} and gradients={self.gradients!r}.",
                hint='Each is "host" or "device".',
            )
        if self.how == "device" and self.gradients == "host":
            raise NotApplicable(
                "Gradients on the host were asked for, but states are stepped on the device.",
                hint='Use how="host", or gradients="device".',
            )

    @property
    def staging_bytes(self) -> int:
        """Most GPU bytes in transit, besides parameters, states that stay and the largest gradient."""
        if self.how == "device":
            return DEVICE_SLOTS * self.piece_bytes + self.window_bytes
        return self.piece_bytes  # of gradients in transit

    def why_not(self, training: Training) -> str | None:
        modules, groups = list(training.model.modules()), training.optimizer.param_groups
        if any(isinstance(module, DistributedDataParallel) for module in modules):
            return "DistributedDataParallel averages gradients after they would have been stepped"
        if any(isinstance(module, nn.Embedding) and module.sparse for module in modules):
            return "an embedding has sparse gradients, which have no pieces"
        if any(type(parameter.data) is not Tensor for parameter in trained_parameters(training.optimizer)):
            return "some parameters are sharded or of a tensor type of their own"
        rates = [group["lr"] for group in groups]
        if self.how == "host" and any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates):
            return "the learning rate is a tensor on the GPU, and the host would wait for it at each parameter"
        if isinstance(training.optimizer, SGD) and not any(group["momentum"] for group in groups):
            return "SGD without momentum keeps no states"
        return why_not_in_pieces(training.optimizer)

    def place(self, training: Training, stack: ExitStack) -> None:
        steps, state = parameter_steps(training.optimizer), training.optimizer.state
        trained = list(trained_parameters(training.optimizer))
        largest = max((parameter.numel() for parameter in trained), default=0)
        sizes = {"gpu_bytes": self.gpu_bytes, "piece_bytes": self.piece_bytes, "largest": largest}
        if self.how == "device":
            way: PiecewiseStep = DeviceStep(steps.function, training.device, window_bytes=self.window_bytes, **sizes)
        else:
            way = HostStep(steps.function, training.optimizer, training.device, **sizes)
            stack.callback(way.close)
        # Check the host's memory.
        needed = -self.gpu_bytes + sum(parameter.nbytes for parameter in trained if self.gradients == "host")
        needed += sum(way.state_bytes(p, state.get(p, {}), steps.group(p)) for p in trained)
        free = free_host_bytes()
        if needed > free and not on_virtual_gpu(training.device):
            raise NotApplicable(
                f"{format_bytes(needed)} of optimizer states would go to the host, which has {format_bytes(free)} free.",
                hint=f"Keep more of them on the GPU: gpu_bytes={self.gpu_bytes + needed - free} or more.",
            )
        # Allocate everything now: if the host has too little memory, fail before anything has changed.
        try:
            stack.callback(steps.replace(way, finish=way.finish))
            for parameter in trained:
                way.pieces(parameter, state[parameter], steps.group(parameter))
        except HostMemoryExhausted as error:
            raise NotApplicable(str(error), hint=error.hint) from error
        if isinstance(way, HostStep) and self.gradients == "host":
            stepper: BackwardStepper = HostGradientStepper(training.model, training.stepper, way)
        else:
            stepper = BackwardStepper(training.model, training.stepper)
        stepper.hook_parameters(stack)
        stack.callback(training.replace_stepper(stepper))

    def apply(self, training: Training) -> Undo:
        put_back = super().apply(training)

        def undo() -> None:
            """Raise, before anything moves, if the states do not fit back on the GPU."""
            if training.device.type == "cuda":
                pieces = [piece for state in training.optimizer.state.values() for piece in pieces_of(state)]
                needed = sum(p.packing.byte_count for p in pieces if p.started and p.buffer is not None)
                free = torch.cuda.mem_get_info(training.device)[0]
                free += torch.cuda.memory_reserved(training.device) - torch.cuda.memory_allocated(training.device)
                if needed > free:
                    raise RequestError(
                        f"{format_bytes(needed)} of optimizer states are on the host, and the GPU has "
                        f"{format_bytes(free)} free.",
                        hint="Go on with the fit, or save model.state_dict() and optimizer.state_dict(), which are plain, "
                        "and reload.",
                    )
            put_back()

        return undo
