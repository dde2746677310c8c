"""A profile of a made-up training with round numbers, for what techniques expect to save."""

from typing import Any

from tonnage.fit.measure.profile import BlockProfile, OperatorProfile, Profile
from tonnage.units import GIB, MIB

OPERATORS = (
    OperatorProfile(
        index=0,
        name="aten.mul.Tensor",
        module="input_layernorm",
        output_bytes=64 * MIB,
        kept_bytes=64 * MIB,
        seconds=0.1,
    ),
    OperatorProfile(
        index=1, name="aten.mm.default", module="mlp.up", output_bytes=256 * MIB, kept_bytes=256 * MIB, seconds=1.0
    ),
    OperatorProfile(
        index=2, name="aten.gelu.default", module="mlp.act", output_bytes=256 * MIB, kept_bytes=256 * MIB, seconds=0.2
    ),
    OperatorProfile(
        index=3, name="aten.mm.default", module="mlp.down", output_bytes=64 * MIB, kept_bytes=0, seconds=1.0
    ),
)


def block(index: int) -> BlockProfile:
    return BlockProfile(
        name=f"layers.{index}",
        kind="Block",
        parameters_bytes=32 * MIB,
        input_bytes=64 * MIB,
        kept_bytes=576 * MIB,
        forward_peak_bytes=704 * MIB,
        backward_peak_bytes=320 * MIB,
        forward_s=2.3,
        backward_s=4.6,
        operators=OPERATORS,
    )


def profile(**changes: Any) -> Profile:
    """Two blocks at eight rows; fields may be given anew."""
    plain: dict[str, Any] = {
        "device": "NVIDIA H200",
        "virtual": False,
        "capacity_bytes": 140 * GIB,
        "micro_batch_rows": 8,
        "batch_rows": 8,
        "tokens": 8 * 4096,
        "parameters_bytes": 64 * MIB,
        "gradients_bytes": 64 * MIB,
        "optimizer_bytes": 128 * MIB,
        "largest_parameter_bytes": 16 * MIB,
        "blocks": (block(0), block(1)),
        "outside_kept_bytes": 64 * MIB,
        "logits_bytes": GIB,
        "loss_peak_bytes": 2 * GIB,
        "forward_s": 5.0,
        "backward_s": 10.0,
        "optimizer_s": 0.4,
        "link_to_host_bytes_per_s": 50e9,
        "link_to_device_bytes_per_s": 50e9,
        "host_step_bytes_per_s": 20e9,
        "host_free_bytes": 64 * GIB,
    }
    return Profile(**(plain | changes))
