"""CUDA graphs by hand and through make_graphed_callables, side streams, events, and a read that a capture forbids."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
inputs = torch.randn(8, 64, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        model(inputs).sum().backward()
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = model(inputs)
graph.replay()
graphed = torch.cuda.make_graphed_callables(model, (inputs,))
graphed(inputs).sum().backward()

try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        (inputs * 2).sum().item()
except RuntimeError as error:
    print("forbidden:", str(error).splitlines()[0])

begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
model(inputs)
end.record()
assert not end.query()
torch.cuda.synchronize()
assert end.query() and begin.elapsed_time(end) > 0
print("graphs ran")
