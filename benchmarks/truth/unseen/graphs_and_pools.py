"""Latency work: whole-iteration CUDA graph, make_graphed_callables, separate memory pools, side streams."""

import argparse
import torch
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--what", default="iteration", choices=["iteration", "callables", "pool", "streams", "buckets"])
ap.add_argument("--batch", type=int, default=512)
ap.add_argument("--d", type=int, default=4096)
a = ap.parse_args()
torch.manual_seed(0)


class MLP(nn.Module):
    def __init__(self, d, n=6):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d)) for _ in range(n)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(n))

    def forward(self, x):
        for b, n in zip(self.blocks, self.norms):
            x = x + b(n(x))
        return x


net = MLP(a.d).cuda()
loss_fn = nn.MSELoss()
if a.what == "iteration":
    opt = torch.optim.Adam(net.parameters(), lr=1e-4, capturable=True)
    x, y = torch.randn(a.batch, a.d, device="cuda"), torch.randn(a.batch, a.d, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            opt.zero_grad(set_to_none=True)
            loss_fn(net(x), y).backward()
            opt.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = loss_fn(net(x), y)
        loss.backward()
        opt.step()
    for _ in range(5):
        x.copy_(torch.randn(a.batch, a.d))
        y.normal_()
        graph.replay()
    print(loss.item())
elif a.what == "callables":
    first, second = net, MLP(a.d, 3).cuda()
    x = torch.randn(a.batch, a.d, device="cuda")
    first = torch.cuda.make_graphed_callables(first, (x,))
    opt = torch.optim.SGD([*net.parameters(), *second.parameters()], lr=0.01)
    for i in range(4):
        h = first(torch.randn(a.batch, a.d, device="cuda"))
        out = second(h if i % 2 else h[: a.batch // 2])
        out.square().mean().backward()
        opt.step()
        opt.zero_grad()
    print(out.shape)
elif a.what == "pool":
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        cache = [torch.empty(a.batch, 64, a.d // 64, 64, device="cuda") for _ in range(8)]
        table = torch.randn(50_000, a.d // 4, device="cuda")
    opt = torch.optim.AdamW(net.parameters())
    for i in range(4):
        out = net(torch.randn(a.batch, a.d, device="cuda"))
        cache[i].view(a.batch, -1)[:, : a.d].copy_(out.detach())
        (out.mean() + table[torch.randint(0, 50_000, (a.batch,), device="cuda")].mean()).backward()
        opt.step()
        opt.zero_grad()
    del cache, table
    print(out.mean().item())
elif a.what == "streams":
    streams = [torch.cuda.Stream() for _ in range(3)]
    done = []
    with torch.no_grad():
        for i in range(12):
            s = streams[i % 3]
            x = torch.randn(a.batch * (1 + i % 4), a.d, device="cuda")
            s.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s):
                x.record_stream(s)
                y = net(x)
                e = torch.cuda.Event()
                e.record(s)
            del x
            done.append((e, y))
            if len(done) > 2:
                ev, y0 = done.pop(0)
                ev.synchronize()
                y0.record_stream(torch.cuda.current_stream())
                print(y0.mean().item())
    torch.cuda.synchronize()
else:  # one graph a batch size, one shared pool, largest first
    net.eval()
    graphs, pool = {}, None
    with torch.no_grad():
        static = torch.zeros(a.batch * 4, a.d, device="cuda")
        for n in (a.batch * 4, a.batch * 2, a.batch, a.batch // 2, 1):
            net(static[:n])
            torch.cuda.synchronize()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g, pool=pool):
                o = net(static[:n])
            pool = pool or g.pool()
            graphs[n] = (g, o)
        for n in (1, a.batch // 3, a.batch + 5, a.batch * 4):
            size = min(s for s in graphs if s >= n)
            static[:n] = torch.randn(n, a.d, device="cuda")
            graphs[size][0].replay()
            print(n, size, graphs[size][1][:n].mean().item())
