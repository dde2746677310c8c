# WGAN-GP, faces 64x64/128x128. based on a notebook, cleaned up a bit
import sys
import torch
from torch import nn, autograd

IMG = int(sys.argv[1]) if len(sys.argv) > 1 else 64
BATCH = int(sys.argv[2]) if len(sys.argv) > 2 else 128
NGF = 64
LAMBDA = 10
CRITIC_ITERS = 3
Z = 128

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(999)

n_up = {32: 3, 64: 4, 128: 5, 256: 6}[IMG] - 1


class G(nn.Module):
    def __init__(self):
        super(G, self).__init__()
        ch = NGF * 2**n_up
        mods = [nn.ConvTranspose2d(Z, ch, 4, 1, 0, bias=False), nn.BatchNorm2d(ch), nn.ReLU(True)]
        for _ in range(n_up):
            mods += [nn.ConvTranspose2d(ch, ch // 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ch // 2), nn.ReLU(True)]
            ch //= 2
        mods += [nn.ConvTranspose2d(ch, 3, 4, 2, 1, bias=False), nn.Tanh()]
        self.main = nn.Sequential(*mods)

    def forward(self, z):
        return self.main(z)


class D(nn.Module):
    def __init__(self):
        super(D, self).__init__()
        ch = NGF
        mods = [nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2)]
        for _ in range(n_up):
            mods += [nn.Conv2d(ch, ch * 2, 4, 2, 1), nn.InstanceNorm2d(ch * 2, affine=True), nn.LeakyReLU(0.2)]
            ch *= 2
        mods += [nn.Conv2d(ch, 1, 4, 1, 0)]
        self.main = nn.Sequential(*mods)

    def forward(self, x):
        return self.main(x).view(-1)


netG, netD = G().to(device), D().to(device)
optD = torch.optim.Adam(netD.parameters(), lr=1e-4, betas=(0.0, 0.9))
optG = torch.optim.Adam(netG.parameters(), lr=1e-4, betas=(0.0, 0.9))


def calc_gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1, 1, 1).to(device).expand(real.size())
    inter = alpha * real + (1 - alpha) * fake
    inter = autograd.Variable(inter, requires_grad=True)
    d = netD(inter)
    g = autograd.grad(
        outputs=d,
        inputs=inter,
        grad_outputs=torch.ones(d.size()).to(device),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    g = g.view(g.size(0), -1)
    return ((g.norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


fixed = torch.randn(64, Z, 1, 1, device=device)
d_losses, g_losses, samples = [], [], []
for it in range(3):
    for p in netD.parameters():
        p.requires_grad = True
    for _ in range(CRITIC_ITERS):
        real = torch.rand(BATCH, 3, IMG, IMG).mul_(2).sub_(1).to(device)
        netD.zero_grad()
        d_real = netD(real).mean()
        (-d_real).backward()
        with torch.no_grad():
            z = torch.randn(BATCH, Z, 1, 1, device=device)
        fake = netG(z).detach()
        d_fake = netD(fake).mean()
        d_fake.backward()
        gp = calc_gradient_penalty(real.data, fake.data)
        gp.backward()
        optD.step()
        d_losses.append(d_fake - d_real + gp)  # keeps tensors on purpose (for the plot)
    for p in netD.parameters():
        p.requires_grad = False
    netG.zero_grad()
    gl = -netD(netG(torch.randn(BATCH, Z, 1, 1, device=device))).mean()
    gl.backward()
    optG.step()
    g_losses.append(gl)
    samples.append(netG(fixed))  # forgot no_grad
    print("[%d] D %.3f G %.3f" % (it, d_losses[-1].item(), gl.item()))
