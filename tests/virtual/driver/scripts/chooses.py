"""What depends on the card: attention's backend, workspaces, CUB's sizes."""

import json

import torch


def blocks(act):
    act()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    act()
    return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before


q = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
a = torch.randn(256, 256, device="cuda")
start = torch.cuda.memory_allocated()
a @ a
chosen = torch._fused_sdp_choice(q, q, q, None, 0.0, True)
print(
    json.dumps(
        {
            "capability": torch.cuda.get_device_capability(),
            "attention": int(chosen),
            "cublas_workspace": torch.cuda.memory_allocated() - start,
            "sum": blocks(lambda: torch.randn(1 << 22, device="cuda").sum()),
            "sort": blocks(lambda: torch.randn(1 << 20, device="cuda").sort()),
            "unique": blocks(lambda: torch.arange(1 << 16, device="cuda").unique()),
        }
    )
)
