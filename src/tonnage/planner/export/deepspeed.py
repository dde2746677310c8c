"""DeepSpeed's JSON: ZeRO stages, offload to the host and to NVMe, precision, optimizer. Written for DeepSpeed 0.19.

Activation recomputation is up to the model: `train.py` sets it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tonnage.planner.export.launch import CLIP_NORM, LEARNING_RATE, TrainingRun, reasons

FILE = "deepspeed.json"
NVME_PATH = "/local_nvme"
_DEVICES = MappingProxyType({"gpu": "none", "host": "cpu", "nvme": "nvme"})
# Optimizers as DeepSpeed names them; unknown names are looked up in torch.optim.
_NAMES = MappingProxyType(
    {"sgd": "SGD", "momentum": "SGD", "adam": "Adam", "adamw": "AdamW", "lion": "Lion", "muon": "Muon"}
)
_OWN = ("adam", "adamw", "lion", "muon")


def obstacles(launch: TrainingRun) -> list[str]:
    """Return what the file cannot express."""
    configuration, sizes = launch.configuration, launch.sizes
    optimizer, place = configuration.optimizer, configuration.optimizer_place
    return reasons(
        (sizes.pp > 1, "DeepSpeed's pipeline is built in the model's code, not set in a file"),
        (sizes.tp > 1, "DeepSpeed splits layers by rules of its own, without sequence parallelism"),
        (sizes.cp > 1, "DeepSpeed has no context parallelism, only heads exchanged between ranks"),
        (sizes.ep > 1, "DeepSpeed's experts are built in the model's code, not set in a file"),
        (configuration.precision == "fp8", "DeepSpeed trains in FP8 only through a model that does so itself"),
        (configuration.precision == "bf16" and configuration.zero == 0, "DeepSpeed keeps FP32 copies at stage 0"),
        (sizes.shard < sizes.data and configuration.zero > 0, "DeepSpeed shards over all ranks, never over some"),
        (configuration.quantized_base and configuration.zero == 3, "4-bit weights are not sharded by ZeRO-3"),
        (optimizer == "adafactor", "DeepSpeed flattens parameters, and Adafactor has no rows and columns left"),
        (configuration.activation_place != "gpu", "only models that call DeepSpeed's checkpointing move activations"),
        (configuration.parameter_place != "gpu" and configuration.zero < 3, "parameters leave the GPU in stage 3 only"),
        (place != "gpu" and configuration.zero == 0, "optimizer states leave the GPU from stage 1 on only"),
        (place == "nvme" and configuration.zero < 3, "optimizer states go to NVMe in stage 3 only"),
        (place != "gpu" and optimizer not in ("adam", "adamw", "lion"), f"DeepSpeed has no {optimizer} for the host"),
        (place == "nvme" and optimizer == "lion", "DeepSpeed swaps Adam's states to NVMe, not Lion's"),
    )


def notes(launch: TrainingRun) -> list[str]:
    """Return how the file differs from the plan."""
    configuration = launch.configuration
    return reasons(
        (
            configuration.framework != "deepspeed",
            f"the plan counts {configuration.framework}'s memory; DeepSpeed's buffers and copies are its own",
        ),
        (
            "nvme" in (configuration.optimizer_place, configuration.parameter_place),
            f"states are swapped to {NVME_PATH}: name your fastest drive there",
        ),
    )


def settings(launch: TrainingRun) -> dict[str, Any]:
    """Return the file's settings. Batch sizes are per GPU: their product with the ranks is the global batch."""
    configuration, sizes = launch.configuration, launch.sizes
    precision: dict[str, Any] = {}
    if configuration.precision in ("fp16-mixed", "bf16-mixed"):
        precision = {configuration.precision.removesuffix("-mixed"): {"enabled": True}}
    if configuration.precision == "bf16":
        whole = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        precision = {"bf16": {"enabled": True, **whole}}
    zero: dict[str, Any] = {"stage": configuration.zero}
    if configuration.zero:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if configuration.optimizer_place != "gpu":
        zero["offload_optimizer"] = _offload(configuration.optimizer_place)
    if configuration.parameter_place != "gpu":
        zero["offload_param"] = _offload(configuration.parameter_place)
    if configuration.zero == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "train_micro_batch_size_per_gpu": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.accumulate,
        "gradient_clipping": CLIP_NORM,
        **precision,
        **_optimizer(launch),
        "zero_optimization": zero,
    }


def _optimizer(launch: TrainingRun) -> dict[str, Any]:
    """Return the section for DeepSpeed's and torch's optimizers; one built by the script is only allowed."""
    configuration = launch.configuration
    if configuration.optimizer not in _NAMES:
        return {"zero_allow_untested_optimizer": True}
    parameters: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": 0.0}
    if configuration.optimizer == "momentum":
        parameters["momentum"] = 0.9
    if configuration.optimizer in ("adam", "adamw"):
        parameters |= {"betas": [0.9, 0.999], "eps": 1e-8, "adam_w_mode": configuration.optimizer == "adamw"}
        # Its own kernel is the fused one; torch's are asked for by name.
        if configuration.optimizer_place == "gpu" and configuration.optimizer_kernel != "fused":
            parameters |= {"torch_adam": True, "foreach": configuration.optimizer_kernel == "foreach"}
    section = {"type": _NAMES[configuration.optimizer], "params": parameters}
    tested = {} if configuration.optimizer in _OWN else {"zero_allow_untested_optimizer": True}
    return {"optimizer": section, **tested}


def _offload(place: str) -> Mapping[str, Any]:
    path = {"nvme_path": NVME_PATH} if place == "nvme" else {}
    return {"device": _DEVICES[place], "pin_memory": True, **path}
