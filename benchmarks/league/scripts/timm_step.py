"""What timm's benchmark does with a model: batches of random images through it, forward alone or in steps of training."""

import argparse

import timm
import timm.layers.weight_init
import torch
from timm.optim import create_optimizer_v2

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("model")
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--image", type=int, required=True)
parser.add_argument("--train", action="store_true")
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--plain-attention", action="store_true", help="as before scaled_dot_product_attention")
parser.add_argument("--no-grad", action="store_true", help="instead of the inference mode")
parser.add_argument(
    "--before-2", action="store_true", help="gradients are kept and set to zero, parameters updated one by one"
)
options = parser.parse_args()

STEPS = 2  # the first searches cuDNN's engines and makes the optimizer's states; the others are alike
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = True
layout = torch.channels_last if options.channels_last else torch.contiguous_format


def on_card(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer as `.to("cuda")` lays it out. Nobody needs a parameter's values, and they are not copied."""
    found = layout if tensor.dim() == 4 else torch.contiguous_format
    if isinstance(tensor, torch.nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda", memory_format=found)
    return tensor.to("cuda", memory_format=found)


# No values are drawn for the weights either, which takes longer than all the rest.
for name in [name for name in vars(torch.nn.init) if name.endswith("_") and not name.startswith("_")]:
    setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
timm.layers.weight_init._trunc_normal_ = lambda tensor, *_: tensor
timm.layers.set_fused_attn(not options.plain_attention)
model = timm.create_model(options.model, in_chans=3, drop_rate=0.0)
model._apply(on_card)


def infer() -> None:
    model.eval()
    with torch.no_grad() if options.no_grad else torch.inference_mode():
        images = torch.randn(options.batch, 3, options.image, options.image, device="cuda")
        images = images.contiguous(memory_format=layout)
        for _ in range(STEPS):
            with torch.autocast("cuda", torch.float16):
                output = model(images)
            torch.cuda.synchronize()
            del output


def train() -> None:
    model.train()
    loss = torch.nn.CrossEntropyLoss().to("cuda")
    optimizer = create_optimizer_v2(model, opt="sgd", lr=1e-4, foreach=False if options.before_2 else None)
    images = torch.randn(options.batch, 3, options.image, options.image, device="cuda")
    images = images.contiguous(memory_format=layout)
    for _ in range(STEPS):
        step(images, loss, optimizer)


def step(images, loss, optimizer) -> None:  # type: ignore[no-untyped-def]
    optimizer.zero_grad(set_to_none=not options.before_2)
    with torch.autocast("cuda", torch.float16):
        output = model(images)
        output = output[0] if isinstance(output, tuple) else output
        target = torch.empty(output.shape[0], device="cuda", dtype=torch.long).random_(model.num_classes)
        loss(output, target).backward()
    optimizer.step()
    torch.cuda.synchronize()


train() if options.train else infer()
