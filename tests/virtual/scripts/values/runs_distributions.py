import torch
from torch.distributions import Categorical, Normal, StudentT, Dirichlet, Beta
out = torch.nn.Linear(4, 10).cuda()(torch.randn(8, 4, device="cuda"))
for d in (Categorical(logits=out), Categorical(probs=out[0].softmax(-1)), Normal(out, out.exp()), StudentT(out.exp()+2), Beta(out.exp(), out.exp())):
    d.log_prob(d.sample())
