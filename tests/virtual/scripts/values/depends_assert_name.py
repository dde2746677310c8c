import torch
def evaluate(model, x):
    correct = (model(x).argmax(-1) == torch.zeros(8, dtype=torch.long, device="cuda")).sum().item()
    return correct / len(x)
model = torch.nn.Linear(4, 4).cuda()
accuracy = evaluate(model, torch.randn(8, 4, device="cuda"))
assert accuracy > 0.9, f"accuracy {accuracy}"
