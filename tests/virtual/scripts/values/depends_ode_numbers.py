import torch
f = torch.nn.Linear(4, 4).cuda()
def solve(y, t, end, dt):
    while t < end:
        err = (f(y) - y).abs().max().item()
        if err <= 1e-3:
            t += dt
            y = y + dt * f(y)
        dt = dt * min(2.0, max(0.2, 0.9 * (1e-3 / err) ** 0.5))
        if dt < 1e-9:
            raise RuntimeError(f"underflow in dt {dt}")
    return y
solve(torch.randn(16, 4, device="cuda"), 0.0, 1.0, 0.1)
