"""Saved tensors leave for the host by hooks that are methods of an object for each step: a cycle, which Python collects."""

import weakref

import torch
from torch import nn

STEPS, BATCH, WIDTH, BLOCKS = 30, 1024, 64, 12


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Copies on another stream; the last tensors stay on the card as long as the object."""

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)
        self.side = torch.cuda.Stream()
        self.leaving: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor]:
        if isinstance(tensor, nn.Parameter) or tensor.numel() < BATCH * WIDTH:
            return tensor
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            on_host.copy_(tensor, non_blocking=True)
        self.leaving.append((tensor, self.side.record_event()))
        if len(self.leaving) > 2:
            torch.cuda.current_stream().wait_event(self.leaving.pop(0)[1])
        return (on_host,)

    def unpack(self, packed: torch.Tensor | tuple[torch.Tensor]) -> torch.Tensor:
        return packed[0].cuda(non_blocking=True) if isinstance(packed, tuple) else packed


blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(BLOCKS)]
net = nn.Sequential(*blocks).cuda()
optimizer = torch.optim.AdamW(net.parameters())
offloads: list[weakref.ref[Offload]] = []
most = 0
for _ in range(STEPS):
    x = torch.randn(BATCH, WIDTH, device="cuda")
    offload = Offload()
    offloads.append(weakref.ref(offload))
    with offload:
        loss = net(x).square().mean()
    del offload
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    most = max(most, sum(reference() is not None for reference in offloads))
print("at once", most)
