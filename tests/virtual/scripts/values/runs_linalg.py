import torch
A = torch.nn.Linear(4, 4).cuda()(torch.randn(4, 4, device="cuda"))
S = A @ A.T + torch.eye(4, device="cuda")
torch.linalg.cholesky(S); torch.linalg.inv(S); torch.linalg.solve(S, A); torch.linalg.eigh(S)
torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(A.detach())], 1.0, error_if_nonfinite=True)
