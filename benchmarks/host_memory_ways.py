"""Ways of loading a model, each as people write it: python ways.py WAY FOLDER.

The same script is run plainly, where its memory is measured, and on a virtual GPU, where it is predicted. All of them stay on
the CPU, so that no GPU is needed to measure them.
"""

import sys
from pathlib import Path
from typing import Any

import torch


def built(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of the folder's config with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)


def used(model: Any) -> None:
    """Every weight is copied elsewhere, one at a time, as a move to a card does."""
    for parameter in model.parameters():
        parameter.detach().clone()


def load_state_dict(folder: Path) -> None:
    """A model is built, the whole checkpoint read beside it and copied into it."""
    model = built(folder)
    model.load_state_dict(torch.load(folder / "pytorch_model.bin"))


def load_state_dict_kept(folder: Path) -> None:
    """The same, with a reference to the checkpoint that lives on while Adam's states are made."""
    model = built(folder)
    checkpoint = torch.load(folder / "pytorch_model.bin")
    model.load_state_dict(checkpoint)
    moments = [torch.zeros_like(p) for p in model.parameters()]
    assert checkpoint and moments


def mapped_and_assigned(folder: Path) -> None:
    """`mmap=True`, a model on the meta device, `assign=True`; then it is used."""
    with torch.device("meta"):
        model = built(folder)
    checkpoint = torch.load(folder / "pytorch_model.bin", mmap=True)
    model.load_state_dict(checkpoint, assign=True)
    model.tie_weights()
    model.half()


def from_pretrained(folder: Path) -> None:
    """As it is stored, and used once."""
    from transformers import AutoModelForCausalLM

    used(AutoModelForCausalLM.from_pretrained(folder))


def from_pretrained_wider(folder: Path) -> None:
    """A checkpoint of 16 bits as float32."""
    from transformers import AutoModelForCausalLM

    used(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def from_pretrained_bin(folder: Path) -> None:
    """A checkpoint that was pickled, in 16 bits."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=False)


def from_pretrained_device_map(folder: Path) -> None:
    """With accelerate's `device_map`, in the other type of 16 bits."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, device_map="cpu")


def load_file(folder: Path) -> None:
    """Safetensors into a model that was built before."""
    from safetensors.torch import load_file

    model = built(folder)
    state = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    model.load_state_dict(state, strict=False)


def load_file_assigned(folder: Path) -> None:
    """Safetensors as the weights of a model without any; then it is used."""
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = built(folder)
    for file in sorted(folder.glob("*.safetensors")):
        model.load_state_dict(load_file(file), assign=True, strict=False)
    model.tie_weights()
    used(model)


def built_and_halved(folder: Path) -> None:
    """Built in float32, then made half as wide."""
    built(folder).half()


def optimizer_state(folder: Path) -> None:
    """A training that goes on: weights, and Adam's states, which `load_state_dict` copies."""
    model = built(folder)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = torch.load(folder / "training.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


def averaged(folder: Path) -> None:
    """A copy of the model for a moving average, and a checkpoint of both in memory."""
    from copy import deepcopy

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    average = deepcopy(model)
    saved = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    assert saved


def quantized(folder: Path) -> None:
    """Linear layers in 8 bits, one by one, of a checkpoint in 16 bits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.detach().abs().amax(dim=1, keepdim=True) / 127
            whole = (module.weight.detach() / scale).round().to(torch.int8)
            del module.weight
            module.register_buffer("weight", whole)


def workers(folder: Path) -> None:
    """A dataset in memory and workers that each make batches of it."""
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.ones(1 << 12, 1 << 16))
    for _ in DataLoader(data, batch_size=64, num_workers=2):
        pass


# -- on a card: what the host holds then


def context(folder: Path) -> None:
    """One tensor on the card."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def libraries(folder: Path) -> None:
    """A matrix product, a convolution, attention and their backward: cuBLAS, cuDNN and kernels are loaded."""
    x = torch.randn(8, 64, 64, device="cuda", requires_grad=True)
    y = torch.nn.functional.scaled_dot_product_attention(x @ x, x, x)
    torch.nn.functional.conv2d(y[None], torch.randn(8, 8, 3, 3, device="cuda")).sum().backward()
    torch.cuda.synchronize()


def to_card(folder: Path) -> None:
    """Loaded as it is stored, then moved."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).cuda()
    torch.cuda.synchronize()


def device_map_card(folder: Path) -> None:
    """Straight to the card."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, device_map="cuda")
    torch.cuda.synchronize()


def checkpoint_to_card(folder: Path) -> None:
    """Built on the host, moved, and a pickled checkpoint read with `map_location="cuda"`."""
    model = built(folder).cuda()
    model.load_state_dict(torch.load(folder / "pytorch_model.bin", map_location="cuda"))
    torch.cuda.synchronize()


def pinned(folder: Path) -> None:
    """A gigabyte that is pinned, and its copy on the card."""
    torch.ones(1 << 28).pin_memory().cuda(non_blocking=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
