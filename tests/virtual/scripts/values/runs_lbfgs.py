import torch
model = torch.nn.Linear(4, 4).cuda(); x = torch.randn(8, 4, device="cuda")
opt = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
def closure():
    opt.zero_grad(); loss = model(x).square().mean(); loss.backward(); return loss
for _ in range(3): opt.step(closure)
