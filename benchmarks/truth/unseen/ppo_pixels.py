"""PPO from pixels with the rollout kept on the GPU, in the manner of single-file RL implementations."""

from dataclasses import dataclass, fields
import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical


@dataclass
class Args:
    seed: int = 1
    num_envs: int = 64
    num_steps: int = 128
    num_minibatches: int = 4
    update_epochs: int = 2
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.1
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    compile: int = 0
    compile_mode: str = "default"


p = argparse.ArgumentParser()
for f in fields(Args):
    p.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=f.default)
args = Args(**vars(p.parse_args()))


def layer_init(layer, std=2**0.5, bias=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias)
    return layer


class ResidualBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv0, self.conv1 = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        return x + self.conv1(torch.relu(self.conv0(torch.relu(x))))


class Agent(nn.Module):
    def __init__(self, n_actions=15):
        super().__init__()
        seq, c = [], 4
        for out in (32, 64, 64):
            seq += [nn.Conv2d(c, out, 3, padding=1), nn.MaxPool2d(3, 2, 1), ResidualBlock(out), ResidualBlock(out)]
            c = out
        self.network = nn.Sequential(*seq, nn.Flatten(), nn.ReLU(), nn.Linear(64 * 11 * 11, 512), nn.ReLU())
        self.actor = layer_init(nn.Linear(512, n_actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def get_value(self, x):
        return self.critic(self.network(x / 255.0))

    def get_action_and_value(self, x, action=None):
        hidden = self.network(x / 255.0)
        logits = self.actor(hidden)
        probs = Categorical(logits=logits, validate_args=False)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


class FakeVecEnv:
    """Frames from a host generator, so that the loop costs what a real one does."""

    def __init__(self, n, seed):
        self.n, self.g = n, torch.Generator().manual_seed(seed)

    def step(self, actions):
        obs = torch.randint(0, 256, (self.n, 4, 84, 84), generator=self.g, dtype=torch.uint8)
        return obs, torch.randn(self.n, generator=self.g), torch.rand(self.n, generator=self.g) < 0.01


if __name__ == "__main__":
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    envs = FakeVecEnv(args.num_envs, args.seed)
    agent = Agent().to(device)
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    if args.compile:
        agent.get_action_and_value = torch.compile(agent.get_action_and_value, mode=args.compile_mode)

    T, N = args.num_steps, args.num_envs
    obs = torch.zeros((T, N, 4, 84, 84)).to(device)
    actions = torch.zeros((T, N)).to(device)
    logprobs, rewards, dones, values = (torch.zeros((T, N)).to(device) for _ in range(4))
    next_obs = envs.step(None)[0].to(device).float()
    next_done = torch.zeros(N).to(device)
    for iteration in range(2):
        for step in range(T):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            o, r, d = envs.step(action.cpu().numpy())
            rewards[step] = r.to(device).view(-1)
            next_obs, next_done = o.to(device).float(), d.to(device).float()
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards).to(device)
            lastgaelam = 0
            for t in reversed(range(T)):
                nonterminal = 1.0 - (next_done if t == T - 1 else dones[t + 1])
                nextvalues = next_value if t == T - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * nextvalues * nonterminal - values[t]
                advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
            returns = advantages + values
        b_obs, b_logprobs, b_actions = obs.reshape(-1, 4, 84, 84), logprobs.reshape(-1), actions.reshape(-1)
        b_adv, b_ret = advantages.reshape(-1), returns.reshape(-1)
        mb = T * N // args.num_minibatches
        clipfracs = []
        for epoch in range(args.update_epochs):
            b_inds = torch.randperm(T * N, device=device)
            for start in range(0, T * N, mb):
                i = b_inds[start : start + mb]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[i], b_actions.long()[i])
                ratio = (newlogprob - b_logprobs[i]).exp()
                with torch.no_grad():
                    clipfracs += [((ratio - 1.0).abs() > args.clip_coef).float().mean().item()]
                a = b_adv[i]
                a = (a - a.mean()) / (a.std() + 1e-8)
                pg = torch.max(-a * ratio, -a * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)).mean()
                v = 0.5 * ((newvalue.view(-1) - b_ret[i]) ** 2).mean()
                loss = pg - args.ent_coef * entropy.mean() + v * args.vf_coef
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        print(iteration, loss.item(), sum(clipfracs) / len(clipfracs))
