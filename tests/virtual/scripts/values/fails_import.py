import torch

loss = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")).square().mean()
if loss.item() > 0.5:
    import no_such_module_at_all
