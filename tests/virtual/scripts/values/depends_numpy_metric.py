import torch
import numpy as np
def roc(y, scores):
    if len(np.unique(scores)) < 2:
        raise ValueError("only one score")
out = torch.nn.Linear(4, 1).cuda()(torch.randn(8, 4, device="cuda")).squeeze(1)
roc(np.zeros(8), out.sigmoid().detach().cpu().numpy())
