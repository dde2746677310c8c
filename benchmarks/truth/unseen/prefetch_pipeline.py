"""Production-like training pipeline: config, callbacks, a CUDA-stream prefetcher, and a periodic in-memory checkpoint."""

from __future__ import annotations

import argparse
import io
import logging
from dataclasses import dataclass, field
from typing import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger("train")


@dataclass
class DataConfig:
    batch_size: int = 128
    image_size: int = 192
    length: int = 1024


@dataclass
class TrainConfig:
    data: DataConfig = field(default_factory=DataConfig)
    dims: tuple[int, ...] = (96, 192, 384, 768)
    depths: tuple[int, ...] = (3, 3, 9, 3)
    lr: float = 4e-3
    steps: int = 6
    compile: bool = False
    checkpoint_every: int = 3
    log_memory: bool = False


class SyntheticImages(Dataset):
    def __init__(self, cfg: DataConfig) -> None:
        self.cfg = cfg

    def __len__(self) -> int:
        return self.cfg.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        g = torch.Generator().manual_seed(index)
        return torch.randint(
            0, 256, (3, self.cfg.image_size, self.cfg.image_size), dtype=torch.uint8, generator=g
        ), index % 1000


class CudaPrefetcher:
    """Copies the next batch on a side stream while the current one is computed."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([123.7, 116.3, 103.5], device="cuda").view(1, 3, 1, 1)
        self.std = torch.tensor([58.4, 57.1, 57.4], device="cuda").view(1, 3, 1, 1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first = True
        for next_x, next_y in self.loader:
            with torch.cuda.stream(self.stream):
                next_x = next_x.cuda(non_blocking=True)
                next_y = next_y.cuda(non_blocking=True)
                next_x = next_x.float().sub_(self.mean).div_(self.std)
            if not first:
                yield x, y  # noqa: F821
            first = False
            torch.cuda.current_stream().wait_stream(self.stream)
            x, y = next_x, next_y
            x.record_stream(torch.cuda.current_stream())
            y.record_stream(torch.cuda.current_stream())
        yield x, y


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dw = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-6 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dw(x).permute(0, 2, 3, 1)
        y = self.down(nn.functional.gelu(self.up(self.norm(y)))) * self.gamma
        return x + y.permute(0, 3, 1, 2)


def build(cfg: TrainConfig) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, cfg.dims[0], 4, 4), LayerNorm2d(cfg.dims[0])]
    for i, (dim, depth) in enumerate(zip(cfg.dims, cfg.depths)):
        if i:
            layers += [LayerNorm2d(cfg.dims[i - 1]), nn.Conv2d(cfg.dims[i - 1], dim, 2, 2)]
        layers += [ConvNeXtBlock(dim) for _ in range(depth)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cfg.dims[-1], 1000))


class Trainer:
    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg = cfg
        self.model = build(cfg).cuda().to(memory_format=torch.channels_last)
        self.forward: Callable = torch.compile(self.model) if cfg.compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.05, foreach=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, cfg.lr, total_steps=cfg.steps + 1)
        self.callbacks: list[Callable[[int, Tensor], None]] = [self.log, self.snapshot]
        self.buffer = io.BytesIO()

    def log(self, step: int, loss: Tensor) -> None:
        logger.info("step %d loss %.4f", step, loss.item())
        if self.cfg.log_memory:
            logger.info(torch.cuda.memory_summary(abbreviated=True))

    def snapshot(self, step: int, loss: Tensor) -> None:
        if step % self.cfg.checkpoint_every == self.cfg.checkpoint_every - 1:
            self.buffer = io.BytesIO()
            torch.save(
                {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}, self.buffer
            )

    def restore(self) -> None:
        self.buffer.seek(0)
        state = torch.load(self.buffer, map_location="cuda")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def fit(self) -> None:
        loader = DataLoader(SyntheticImages(self.cfg.data), self.cfg.data.batch_size, pin_memory=True, drop_last=True)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for step, (x, y) in enumerate(CudaPrefetcher(loader)):
            start.record()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(
                    self.forward(x.to(memory_format=torch.channels_last)), y, label_smoothing=0.1
                )
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            end.record()
            for callback in self.callbacks:
                callback(step, loss)
            if step + 1 == self.cfg.steps:
                break
        torch.cuda.synchronize()
        logger.info("last step %.1f ms", start.elapsed_time(end))


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=192)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--log-memory", action="store_true")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(17)
    cfg = TrainConfig(
        data=DataConfig(args.batch_size, args.image_size, args.batch_size * 7),
        compile=args.compile,
        log_memory=args.log_memory,
    )
    trainer = Trainer(cfg)
    trainer.fit()
    if args.resume:
        trainer.restore()
        trainer.schedule = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, cfg.lr, total_steps=cfg.steps + 1)
        trainer.fit()


if __name__ == "__main__":
    main()
