"""DeepSpeed's JSON: ZeRO stages, offload to the host and to NVMe, precision, optimizer. Written for DeepSpeed 0.19.

Activation recomputation is up to the model: `train.py` sets it.
"""

from collections.abc import Mapping
from typing import Any

from tonnage.planner.export.launch import CLIP_NORM, LEARNING_RATE, TrainingRun, reasons

FILE = "deepspeed.json"
NVME_PATH = "/local_nvme"
_DEVICES = {"gpu": "none", "host": "cpu", "nvme": "nvme"}
# Optimizers as DeepSpeed names them; unknown names are looked up in torch.optim.
_NAMES = {"sgd": "SGD", "momentum": "SGD", "adam": "Adam", "adamw": "AdamW", "lion": "Lion", "muon": "Muon"}
_OWN = ("adam", "adamw", "lion", "muon")


def obstacles(launch: TrainingRun) -> list[str]:
    """Return what the file cannot express."""
    config, sizes = launch.configuration, launch.sizes
    optimizer, place = config.optimizer, config.optimizer_place
    return reasons(
        (sizes.pp > 1, "DeepSpeed's pipeline is built in the model's code, not set in a file"),
        (sizes.tp > 1, "DeepSpeed splits layers by rules of its own, without sequence parallelism"),
        (sizes.cp > 1, "DeepSpeed has no context parallelism, only heads exchanged between ranks"),
        (sizes.ep > 1, "DeepSpeed's experts are built in the model's code, not set in a file"),
        (config.precision == "fp8", "DeepSpeed trains in FP8 only through a model that does so itself"),
        (config.precision == "bf16" and config.zero == 0, "DeepSpeed keeps FP32 copies at stage 0"),
        (sizes.shard < sizes.data and config.zero > 0, "DeepSpeed shards over all ranks, never over some"),
        (config.quantized_base and config.zero == 3, "4-bit weights are not sharded by ZeRO-3"),
        (optimizer == "adafactor", "DeepSpeed flattens parameters, and Adafactor has no rows and columns left"),
        (config.activation_place != "gpu", "only models that call DeepSpeed's checkpointing move activations"),
        (config.parameter_place != "gpu" and config.zero < 3, "parameters leave the GPU in stage 3 only"),
        (place != "gpu" and config.zero == 0, "optimizer states leave the GPU from stage 1 on only"),
        (place == "nvme" and config.zero < 3, "optimizer states go to NVMe in stage 3 only"),
        (place != "gpu" and optimizer not in ("adam", "adamw", "lion"), f"DeepSpeed has no {optimizer} for the host"),
        (place == "nvme" and optimizer == "lion", "DeepSpeed swaps Adam's states to NVMe, not Lion's"),
    )


def notes(launch: TrainingRun) -> list[str]:
    """Return how the file differs from the plan."""
    config = launch.configuration
    counted = f"the plan counts {config.framework}'s memory; DeepSpeed's buffers and copies are its own"
    swaps = "nvme" in (config.optimizer_place, config.parameter_place)
    swapped = f"states are swapped to {NVME_PATH}: name your fastest drive there"
    return reasons((config.framework != "deepspeed", counted), (swaps, swapped))


def settings(launch: TrainingRun) -> dict[str, Any]:
    """Return the file's settings. Batch sizes are per GPU: their product with the ranks is the global batch."""
    config, sizes = launch.configuration, launch.sizes
    precision: dict[str, Any] = {}
    if config.precision in ("fp16-mixed", "bf16-mixed"):
        precision = {config.precision.removesuffix("-mixed"): {"enabled": True}}
    if config.precision == "bf16":
        whole = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        precision = {"bf16": {"enabled": True, **whole}}
    # DeepSpeed's and torch's optimizers; one built by the script is only allowed.
    untested = {"zero_allow_untested_optimizer": True}
    parameters: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": 0.0}
    if config.optimizer == "momentum":
        parameters["momentum"] = 0.9
    if config.optimizer in ("adam", "adamw"):
        parameters |= {"betas": [0.9, 0.999], "eps": 1e-8, "adam_w_mode": config.optimizer == "adamw"}
        # Its own kernel is the fused one; torch's are asked for by name.
        if config.optimizer_place == "gpu" and config.optimizer_kernel != "fused":
            parameters |= {"torch_adam": True, "foreach": config.optimizer_kernel == "foreach"}
    optimizer: dict[str, Any] = {}
    if config.optimizer in _NAMES:
        optimizer = {"optimizer": {"type": _NAMES[config.optimizer], "params": parameters}}
    optimizer |= {} if config.optimizer in _OWN else untested
    zero: dict[str, Any] = {"stage": config.zero}
    if config.zero:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if config.optimizer_place != "gpu":
        zero["offload_optimizer"] = _offload(config.optimizer_place)
    if config.parameter_place != "gpu":
        zero["offload_param"] = _offload(config.parameter_place)
    if config.zero == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "train_micro_batch_size_per_gpu": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.accumulate,
        "gradient_clipping": CLIP_NORM,
        **precision,
        **optimizer,
        "zero_optimization": zero,
    }


def _offload(place: str) -> Mapping[str, Any]:
    path = {"nvme_path": NVME_PATH} if place == "nvme" else {}
    return {"device": _DEVICES[place], "pin_memory": True, **path}
