"""A profile with round numbers, for estimates that can be reckoned by hand."""

from tonnage.fit.measure.profile import BlockProfile, Profile
from tonnage.units import GIB


def four_blocks() -> Profile:
    """Two micro-batches of four equal blocks, and a link of 50 GiB/s each way."""
    blocks = tuple(
        BlockProfile(
            name=f"b.{index}",
            kind="b",
            parameters_bytes=2 * GIB,
            input_bytes=GIB,
            kept_bytes=9 * GIB,
            forward_peak_bytes=9 * GIB,
            backward_peak_bytes=2 * GIB,
            forward_s=0.1,
            backward_s=0.2,
        )
        for index in range(4)
    )
    return Profile(
        device="NVIDIA H200",
        virtual=False,
        capacity_bytes=140 * GIB,
        micro_batch_rows=1,
        batch_rows=2,
        tokens=4096,
        parameters_bytes=8 * GIB,
        gradients_bytes=8 * GIB,
        optimizer_bytes=16 * GIB,
        largest_parameter_bytes=GIB,
        blocks=blocks,
        outside_kept_bytes=0,
        logits_bytes=0,
        loss_peak_bytes=0,
        forward_s=0.4,
        backward_s=0.8,
        optimizer_s=0.1,
        link_to_host_bytes_per_s=50 * GIB,
        link_to_device_bytes_per_s=50 * GIB,
        host_step_bytes_per_s=20 * GIB,
        host_free_bytes=100 * GIB,
    )
