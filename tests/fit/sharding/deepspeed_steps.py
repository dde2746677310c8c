"""DeepSpeed under fit on two real ranks, held against one process. In processes of its own: it changes what it is loaded into.

python tests/fit/sharding/deepspeed_steps.py RANK PORT FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

RANKS = 2
STAGES = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, states on the host": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


def main(rank: int, port: str, folder: Path) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(where | {"WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"})
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import deepspeed
    import torch

    torch.set_num_threads(1)
    for name in deepspeed.ops.__compatible_ops__:  # compiled when first used, which takes minutes; none is needed here
        deepspeed.ops.__compatible_ops__[name] = False
    deepspeed.init_distributed(dist_backend="gloo")
    found = {name: _steps(rank, zero, folder) for name, zero in STAGES.items()}
    found["failure"] = _failure(rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def _config(zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,  # 1 unless told
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))


def _loss(model: Any, batch: Any) -> Any:
    from torch import nn

    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def _batches(step: int) -> list[Any]:
    """Of other sizes on each rank; the last one only the first rank has."""
    import torch

    generator = torch.Generator().manual_seed(step)
    sizes = [4, 3] if step < 2 else [1, 0]
    made = [torch.randn(rows, 8, generator=generator) for rows in sizes]
    return [{"x": x, "labels": (x.sum(1) > 0).long()} if len(x) else None for x in made]


def _steps(rank: int, zero: dict[str, Any], folder: Path) -> Any:
    import torch

    import tonnage

    plain, model = _model(), _model()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
    path = folder / f"{rank}.config.json"
    path.write_text(json.dumps(_config(zero)))
    fitted = tonnage.fit(model, optimizers[1], loss=_loss, sample=_batches(0)[0], engine="deepspeed", config=path)
    found, expected = [], []
    with fitted.joined():
        for step in range(3):
            if _batches(step)[rank] is not None:
                found.append(float(fitted.step(_batches(step)[rank])))
    for step in range(3):
        given = [batch for batch in _batches(step) if batch is not None]
        whole = {name: torch.cat([batch[name] for batch in given]) for name in ("x", "labels")}
        loss = _loss(plain, whole)
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        expected.append(float(loss))
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        worst = max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)
    fitted.close()
    losses = [abs(one - other) for one, other in zip(found, expected, strict=False)]
    return {"steps": len(found), "loss": max(losses), "parameters": worst}


def _failure(rank: int) -> Any:
    import torch

    import tonnage

    def breaking(model: Any, batch: Any) -> Any:
        if rank and model.training:
            raise ZeroDivisionError("in forward")
        return _loss(model, batch)

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    settings = _config({"stage": 3})
    fitted = tonnage.fit(
        model, optimizer, loss=breaking, sample=_batches(0)[0], engine="deepspeed", config=settings, weighting="rows"
    )
    try:
        fitted.step(_batches(0)[rank])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
