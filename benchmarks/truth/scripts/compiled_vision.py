"""Train or evaluate an image model from timm under torch.compile."""
import argparse

import torch
import torch._inductor.config
import torch.nn.functional as F
import torchvision_stub  # noqa: F401
import timm

p = argparse.ArgumentParser()
p.add_argument("--model", default="resnet50")
p.add_argument("--batch", type=int, default=128)
p.add_argument("--image", type=int, default=224)
p.add_argument("--mode", default="default")
p.add_argument("--amp", default="none", choices=["none", "bf16", "fp16"])
p.add_argument("--channels-last", action="store_true")
p.add_argument("--infer", default="", choices=["", "no_grad", "inference_mode"])
p.add_argument("--half", action="store_true", help="weights and images in float16")
p.add_argument("--freeze", action="store_true", help="let Inductor fold the weights into constants")
p.add_argument("--benchmark", action="store_true", help="let cuDNN try its algorithms")
args = p.parse_args()

torch.backends.cudnn.benchmark = args.benchmark
torch.backends.cuda.matmul.allow_tf32 = True
torch._inductor.config.freezing = args.freeze
dtype = torch.float16 if args.half else torch.float32
form = torch.channels_last if args.channels_last else torch.contiguous_format
model = timm.create_model(args.model, pretrained=False).to("cuda", dtype=dtype, memory_format=form)
compiled = torch.compile(model, mode=args.mode)
amp = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.amp)

if args.infer:
    model.eval()
    context = torch.no_grad() if args.infer == "no_grad" else torch.inference_mode()
    with context, torch.autocast("cuda", dtype=amp, enabled=amp is not None):
        for step in range(4):
            images = torch.randn(args.batch, 3, args.image, args.image).to("cuda", dtype=dtype, memory_format=form)
            print(step, compiled(images).argmax(1).cpu()[:3].shape)
else:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp == "fp16")
    for step in range(4):
        images = torch.randn(args.batch, 3, args.image, args.image).to("cuda", memory_format=form)
        labels = torch.randint(0, 1000, (args.batch,), device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", dtype=amp, enabled=amp is not None):
            loss = F.cross_entropy(compiled(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(step, loss.item())
