import torch
f = torch.nn.Linear(4, 4).cuda()
def rms(x): return x.abs().pow(2).mean().sqrt()
class Solver:
    def __init__(self, y0, t0, rtol=1e-5, atol=1e-5):
        self.y, self.t, self.rtol, self.atol = y0, t0, rtol, atol
        f0 = f(y0)
        d0, d1 = rms(y0), rms(f0)
        if d0 < 1e-5 or d1 < 1e-5:
            h0 = torch.tensor(1e-6, device=y0.device)
        else:
            h0 = 0.01 * d0 / d1
        self.dt = h0.abs()
    def step(self):
        dt = self.dt
        assert self.t + dt > self.t, 'underflow in dt {}'.format(dt.item())
        assert torch.isfinite(self.y).all(), 'non-finite values in state `y`: {}'.format(self.y)
        k1 = f(self.y); k2 = f(self.y + dt * k1)
        err = rms((k2 - k1) * dt / (self.atol + self.rtol * torch.max(self.y.abs(), k2.abs())))
        accept = err <= 1
        self.y = torch.where(accept, self.y + dt * k2, self.y)
        self.t = torch.where(accept, self.t + dt, self.t)
        self.dt = dt * (0.9 / err.clamp_min(1e-3)).clamp(0.2, 10)
    def integrate(self, times):
        for next_t in times:
            n = 0
            while next_t > self.t:
                assert n < 100000, 'max_num_steps exceeded ({}>={})'.format(n, 100000)
                self.step(); n += 1
        return self.y
times = torch.linspace(0., 1., 5, device="cuda")
y = Solver(torch.randn(16, 4, device="cuda"), times[0]).integrate(times[1:])
y.sum().backward()
