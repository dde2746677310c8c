"""Several phases in one process: pretrain, save to a buffer, drop everything, rebuild on meta, load, finetune in bf16, evaluate."""

import argparse
import copy
import gc
import io

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._pytree import tree_map


class Net(nn.Module):
    def __init__(self, d, layers, vocab=20000):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        dl = nn.TransformerDecoderLayer(
            d, d // 64, 4 * d, batch_first=True, norm_first=True, activation="relu", dropout=0.1
        )
        self.dec = nn.TransformerDecoder(dl, layers)
        self.mem = nn.Parameter(torch.zeros(16, d))
        self.head = nn.Linear(d, vocab)

    def forward(self, batch):
        ids = batch["ids"]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        h = self.dec(
            self.emb(ids),
            self.mem.to(self.emb.weight.dtype).expand(len(ids), -1, -1),
            tgt_mask=mask.to(self.emb.weight.dtype),
            tgt_is_causal=True,
        )
        return {"logits": self.head(h), "hidden": h}


def get_batch(n, t, device):
    g = torch.Generator().manual_seed(n * t)
    batch = {"ids": torch.randint(0, 20000, (n, t), generator=g), "meta": {"weights": torch.rand(n, generator=g)}}
    return tree_map(lambda x: x.to(device), batch)


def train(model, opt, n, t, steps):
    model.train()
    for _ in range(steps):
        batch = get_batch(n, t, "cuda")
        out = model(batch)
        per = F.cross_entropy(
            out["logits"][:, :-1].transpose(1, 2).float(), batch["ids"][:, 1:], reduction="none"
        ).mean(1)
        loss = (per * batch["meta"]["weights"]).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(
        "train",
        loss.item(),
        f"{torch.cuda.memory_allocated() / 2**30:.2f} / {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB",
    )
    return out


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--d", type=int, default=1024)
    ap.add_argument("--layers", type=int, default=8)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--seq", type=int, default=512)
    ap.add_argument("--swa", action="store_true")
    ap.add_argument("--map-cpu", action="store_true")
    a = ap.parse_args()
    torch.manual_seed(0)

    # 1. pretrain
    model = Net(a.d, a.layers).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-4, amsgrad=True)
    out = train(model, opt, a.batch, a.seq, 3)
    if a.swa:
        swa = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(2):
            train(model, opt, a.batch // 2, a.seq, 1)
            swa.update_parameters(model)
        best = copy.deepcopy(swa.module.state_dict())
        del swa

    # 2. save, forget
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, buffer)
    del model, opt, out
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    # 3. rebuild without initialising
    with torch.device("meta"):
        model = Net(a.d, a.layers)
    model = model.to_empty(device="cuda")
    buffer.seek(0)
    state = torch.load(buffer, map_location="cpu" if a.map_cpu else "cuda")
    model.load_state_dict(best if a.swa else state["model"])
    opt = torch.optim.Adam(model.parameters(), lr=1e-5, amsgrad=True)
    opt.load_state_dict(state["opt"])
    del state
    train(model, opt, a.batch, a.seq, 2)

    # 4. half precision, longer sequences, frozen bottom
    model = model.to(torch.bfloat16)
    for p in [*model.emb.parameters(), *model.dec.layers[: a.layers // 2].parameters()]:
        p.requires_grad = False
    opt = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    train(model, opt, a.batch, a.seq * 2, 2)

    # 5. evaluate in growing batches
    model.eval()
    with torch.inference_mode():
        tops = []
        for n in (a.batch, a.batch * 2, a.batch * 3):
            tops.append(model(get_batch(n, a.seq, "cuda"))["logits"].float().log_softmax(-1).topk(5, -1).indices.cpu())
    print([tuple(t.shape) for t in tops])
