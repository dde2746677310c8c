import random
import sys

import numpy as np
import torch
import torch.nn as nn

# everything lives on the GPU
torch.set_default_device("cuda")
random.seed(0)
np.random.seed(0)
torch.manual_seed(0)

CAP = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
BS = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
N_ACT = 6


class ReplayMemory:
    def __init__(self, capacity):
        self.capacity = capacity
        self.s = torch.empty((capacity, 4, 84, 84), dtype=torch.uint8)
        self.a = torch.zeros(capacity, dtype=torch.int64)
        self.r = torch.zeros(capacity)
        self.d = torch.zeros(capacity, dtype=torch.bool)
        self.pos = 0
        self.prio = torch.ones(capacity)

    def push_many(self, s, a, r, d):
        n = len(s)
        idx = torch.arange(self.pos, self.pos + n) % self.capacity
        self.s[idx] = s
        self.a[idx], self.r[idx], self.d[idx] = a, r, d
        self.pos = (self.pos + n) % self.capacity

    def sample(self, n):
        idx = torch.multinomial(self.prio, n, replacement=True)
        nxt = (idx + 1) % self.capacity
        return idx, self.s[idx].float().div(255), self.a[idx], self.r[idx], self.s[nxt].float().div(255), self.d[idx]


class Dueling(nn.Module):
    def __init__(self, atoms=51):
        super().__init__()
        self.atoms = atoms
        self.f = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.v = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, atoms))
        self.adv = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, atoms * N_ACT))

    def forward(self, x):
        h = self.f(x)
        v, a = self.v(h).view(-1, 1, self.atoms), self.adv(h).view(-1, N_ACT, self.atoms)
        return (v + a - a.mean(1, keepdim=True)).log_softmax(-1)


policy, target = Dueling(), Dueling()
target.load_state_dict(policy.state_dict())
target.eval()
opt = torch.optim.RMSprop(policy.parameters(), lr=2.5e-4, alpha=0.95, eps=0.01, centered=True)
memory = ReplayMemory(CAP)
support = torch.linspace(-10, 10, 51)

for step in range(20):
    n_new = random.choice([256, 512, 1024])
    frames = torch.from_numpy(np.random.randint(0, 255, (n_new, 4, 84, 84), dtype=np.uint8)).cuda()
    memory.push_many(frames, torch.randint(0, N_ACT, (n_new,)), torch.randn(n_new), torch.rand(n_new) < 0.02)
    if step < 4:
        continue
    idx, s, a, r, s2, d = memory.sample(BS)
    with torch.no_grad():
        p2 = target(s2).exp()
        best = (policy(s2).exp() * support).sum(-1).argmax(1)
        p2 = p2[torch.arange(BS), best]
        tz = (r[:, None] + 0.99 * support[None] * (~d)[:, None]).clamp(-10, 10)
        b = (tz + 10) / 0.4
        lo, hi = b.floor().long(), b.ceil().long()
        m = torch.zeros(BS, 51)
        m.scatter_add_(1, lo, p2 * (hi.float() - b))
        m.scatter_add_(1, hi.clamp(max=50), p2 * (b - lo.float()))
    logp = policy(s)[torch.arange(BS), a]
    losses = -(m * logp).sum(1)
    opt.zero_grad()
    losses.mean().backward()
    for prm in policy.parameters():
        prm.grad.data.clamp_(-1, 1)
    opt.step()
    memory.prio[idx] = losses.detach().abs() + 1e-3
    if step % 8 == 0:
        target.load_state_dict(policy.state_dict())
    print(step, losses.mean().item())
