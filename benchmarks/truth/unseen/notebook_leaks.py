# exported from notebook. TODO clean up
import sys, copy, math, random
import torch, torch.nn as nn, torch.nn.functional as F
import numpy as np

# In[1]:
MODE = sys.argv[1] if len(sys.argv) > 1 else "losses"
N = int(sys.argv[2]) if len(sys.argv) > 2 else 12
BS = int(sys.argv[3]) if len(sys.argv) > 3 else 256
device = "cuda"
torch.manual_seed(0)
np.random.seed(0)
random.seed(0)

# In[2]:
net = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.Conv2d(64, 128, 3, padding=1),
    nn.BatchNorm2d(128),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(128, 256, 3, padding=1),
    nn.BatchNorm2d(256),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(256, 256, 3, padding=1),
    nn.BatchNorm2d(256),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(4096, 1024),
    nn.ReLU(),
    nn.Dropout(),
    nn.Linear(1024, 100),
).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

# In[3]:  feature visualisation
acts = {}


def hook(name):
    def fn(m, i, o):
        acts.setdefault(name, []).append(o if MODE == "hooks" else o.detach().mean().cpu())

    return fn


for n, m in net.named_modules():
    if isinstance(m, nn.ReLU):
        m.register_forward_hook(hook(n))

# In[4]:
X = torch.randint(0, 255, (BS * 4, 3, 64, 64)).float().to(device) / 255
Y = torch.randint(0, 100, (BS * 4,)).to(device)
print(torch.cuda.memory_allocated() / 1e6, "MB")

# In[5]:
history, preds_all, snapshots, grads = [], [], [], []
total = 0
for it in range(N):
    idx = np.random.choice(len(X), BS)
    x, y = X[idx], Y[idx]
    optimizer.zero_grad()
    out = net(x)
    loss = F.cross_entropy(out, y)
    if MODE == "losses":
        total = total + loss  # keeps every graph
        loss.backward(retain_graph=True)
    else:
        loss.backward()
    optimizer.step()
    history.append(loss)
    preds_all.append(out)
    if MODE == "snapshots":
        snapshots.append(copy.deepcopy(net.state_dict()))
        grads.append([p.grad.clone() for p in net.parameters()])
    if MODE == "cat":
        buf = out.detach().repeat(1, 1000) if it == 0 else torch.cat([buf, out.detach().repeat(1, 1000)])
    if it % 5 == 4:
        torch.cuda.empty_cache()
        print(it, loss.item(), torch.cuda.memory_allocated() / 1e9, torch.cuda.memory_reserved() / 1e9)

# In[6]: plots
plt_y = [h.item() for h in history]
P = torch.cat(preds_all).softmax(-1).detach().cpu().numpy()
print(np.mean(plt_y), P.shape)

# In[7]: saliency
del history, preds_all
torch.cuda.empty_cache()
xs = X[:64].clone().requires_grad_()
net.eval()
s = net(xs).max(1)[0].sum()
s.backward()
sal = xs.grad.abs().max(1)[0]
print(sal.mean().item())
