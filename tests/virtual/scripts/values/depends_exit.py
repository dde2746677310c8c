import torch, sys
loss = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")).square().mean()
value = float(loss)
if value > 0.1:
    print("too large")
    sys.exit(5)
