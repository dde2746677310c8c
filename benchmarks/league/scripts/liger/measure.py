"""Measures cases of Liger-Kernel's benchmarks: of each the median over rounds of the most that was allocated.

    measure.py CASES.json OUT.json

One process measures all cases of a kernel, one after the other, as the publisher's scripts do. A case has `kernel`, `provider`,
`mode`, `x` and `config` as the publisher's table has them, and `late`, which says whether it is of the scripts of 2026, where
sizes are those of a model and every output gets a random gradient.
"""

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

FAMILIES = {
    "losses": (
        "cross_entropy", "fused_linear_cross_entropy", "kl_div", "jsd", "fused_linear_jsd", "tvd", "megatron_cross_entropy",
    ),
    "preferences": (
        "fused_linear_orpo_loss", "fused_linear_cpo_loss", "fused_linear_simpo_loss", "kto_loss", "distill_jsd_loss",
        "distill_cosine_loss", "fused_linear_grpo_loss_token", "fused_linear_grpo_loss_sequence",
    ),
    "norms": ("layer_norm", "rms_norm", "group_norm", "fused_add_rms_norm", "megatron_rms_norm", "dyt", "poly_norm"),
    "layers": (
        "embedding", "geglu", "swiglu", "tiled_geglu", "tiled_swiglu", "megatron_swiglu", "relu_squared", "fused_moe",
    ),
    "attention": (
        "rope", "llama4_rope", "qwen2vl_mrope", "softmax", "sparsemax", "multi_token_attention",
        "sparse_multi_token_attention", "fused_neighborhood_attention",
    ),
}  # fmt: skip


def random_gradient(output: torch.Tensor) -> None:
    output.backward(torch.randn_like(output), retain_graph=True)


def peaks_of(case: dict, rounds: int = 4) -> list[int]:
    """The most that was allocated in each round of the mode that was measured.

    The publisher's ten have the same median: from the second on, when there are gradients, they are alike.
    """
    family = next(name for name, kernels in FAMILIES.items() if case["kernel"] in kernels)
    builder = import_module(family)
    # What is built is on the card; what the kernels make for themselves is where they say.
    with torch.device("cuda"):
        forward, backward = builder.build(case)
    if case["late"]:
        backward = random_gradient

    def full() -> None:
        backward(forward())

    step = full
    if case["mode"] == "forward":
        step = forward
    elif case["mode"] == "backward":
        output = forward()
        gradient = torch.randn_like(output)
        step = lambda: output.backward(gradient, retain_graph=True)  # noqa: E731
    peaks = []
    for _ in range(rounds):
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.append(torch.cuda.max_memory_allocated())
    return peaks


def main() -> None:
    if find_spec("liger_kernel"):
        # It looks for peft and uses none of it here, and that takes twenty seconds to import.
        sys.modules["peft"] = None  # type: ignore[assignment]
        import liger_kernel.chunked_loss
        import liger_kernel.transformers  # noqa: F401
    found: list[int | str] = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        if "dtype" in case["config"]:
            case["config"]["dtype"] = getattr(torch, case["config"]["dtype"].removeprefix("torch."))
        try:
            found.append(int(median(peaks_of(case))))
        except Exception as error:  # one that cannot be run says so, and the others go on
            found.append(f"{type(error).__name__}: {error}")
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
