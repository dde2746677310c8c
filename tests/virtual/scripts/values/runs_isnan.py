import torch, sys
x = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda"))
assert not torch.isnan(x).any()
assert torch.isfinite(x).all()
if not torch.isfinite(x.sum()):
    sys.exit(3)
if torch.isinf(x).any() or (x > 1e4).any():
    raise FloatingPointError("inf")
ok = bool((x.abs() < 1e3).all())
if not ok:
    raise ValueError("large")
