"""Train with CUDA graphs made by hand: a captured step, captured parts (make_graphed_callables), or captured inference."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--way", default="step", choices=["step", "forward-backward", "callables", "infer"])
p.add_argument("--optimizer", default="adamw", choices=["sgd", "adamw", "adamw-fused"])
p.add_argument("--amp", action="store_true")
p.add_argument("--width", type=int, default=2048)
p.add_argument("--layers", type=int, default=8)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seq", type=int, default=512)
p.add_argument("--graphs", type=int, default=1, help="captured batch sizes that share one pool (infer)")
args = p.parse_args()

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(args.width, args.width // 64, 4 * args.width, dropout=0.1, batch_first=True, norm_first=True)
body = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False).cuda()
head = nn.Linear(args.width, 1000).cuda()
params = [*body.parameters(), *head.parameters()]
x = torch.randn(args.batch, args.seq, args.width, device="cuda")
y = torch.randint(0, 1000, (args.batch, args.seq), device="cuda")


def loss_of(x, y):
    with torch.autocast("cuda", torch.bfloat16, enabled=args.amp, cache_enabled=False):
        return F.cross_entropy(head(body(x)).float().flatten(0, 1), y.flatten())


def infer():
    body.eval()
    pool, graphs = None, {}
    with torch.inference_mode():
        for size in [args.batch >> i for i in range(args.graphs)]:
            held = x[:size].clone()
            with torch.autocast("cuda", torch.bfloat16, enabled=args.amp, cache_enabled=False):
                body(held)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    out = head(body(held))
            pool = pool or graph.pool()
            graphs[size] = graph, held, out
        for size, (graph, held, out) in graphs.items():
            held.copy_(torch.randn_like(held))
            graph.replay()
            print(size, out.argmax(-1).cpu().shape)


def train():
    kinds = {"sgd": lambda: torch.optim.SGD(params, lr=0.01, momentum=0.9),
             "adamw": lambda: torch.optim.AdamW(params, lr=1e-4, capturable=True),
             "adamw-fused": lambda: torch.optim.AdamW(params, lr=1e-4, capturable=True, fused=True)}
    optimizer = kinds[args.optimizer]()
    if args.way == "callables":
        global body, head
        with torch.autocast("cuda", torch.bfloat16, enabled=args.amp, cache_enabled=False):
            hidden = torch.randn_like(x, requires_grad=True)
            body, head = torch.cuda.make_graphed_callables((body, head), ((x,), (hidden,)))
    else:
        # Warm up on a side stream, as CUDA graphs need.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                loss_of(x, y).backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = loss_of(x, y)
            loss.backward()
            if args.way == "step":
                optimizer.step()
    for step in range(4):
        inputs, labels = torch.randn(x.shape).cuda(), torch.randint(0, 1000, y.shape).cuda()
        if args.way == "callables":
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(inputs, labels)
            loss.backward()
        else:
            x.copy_(inputs)
            y.copy_(labels)
            graph.replay()
        if args.way != "step":
            optimizer.step()
        print(step, loss.item())


infer() if args.way == "infer" else train()
