import torch
model = torch.nn.Linear(4, 4).cuda(); opt = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(8, 4, device="cuda")
loss = model(x).square().mean()
while loss.item() > 1e-3:
    opt.zero_grad(); loss = model(x).square().mean(); 
print("never")
