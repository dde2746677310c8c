import torch
def cg(A, b, tol=1e-5, most=20):
    x = torch.zeros_like(b); r = b - A @ x; p = r
    for i in range(most):
        Ap = A @ p
        alpha = (r @ r) / (p @ Ap)
        x = x + alpha * p; r2 = r - alpha * Ap
        if r2.norm().item() < tol:
            return x
        p = r2 + (r2 @ r2) / (r @ r) * p; r = r2
    raise RuntimeError("CG did not converge")
A = torch.randn(16, 16, device="cuda") @ torch.randn(16, 16, device="cuda")
cg(A, torch.randn(16, device="cuda") @ A)
