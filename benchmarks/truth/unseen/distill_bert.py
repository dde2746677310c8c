"""Task-agnostic distillation of a BERT teacher into a small student (hidden states, attention maps and logits)."""

try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse
import random

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM


class Corpus(Dataset):
    def __init__(self, n, vocab, max_len):
        rng = random.Random(7)
        self.items = [[rng.randrange(5, vocab) for _ in range(rng.randint(max_len // 4, max_len))] for _ in range(n)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    width = max(len(b) for b in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, b in enumerate(batch):
        ids[i, : len(b)] = torch.tensor(b)
        mask[i, : len(b)] = 1
    labels = ids.clone()
    hide = (torch.rand(ids.shape) < 0.15) & mask.bool()
    labels[~hide] = -100
    ids[hide] = 4
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_gpu_batch_size", default=64, type=int)
    parser.add_argument("--max_len", default=384, type=int)
    parser.add_argument("--alpha_cos", default=1.0, type=float)
    parser.add_argument("--alpha_att", default=0.0, type=float)
    parser.add_argument("--temperature", default=2.0, type=float)
    parser.add_argument("--fp16", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(56)

    impl = "eager" if args.alpha_att > 0 else "sdpa"
    tcfg = BertConfig(attn_implementation=impl)
    scfg = BertConfig(num_hidden_layers=6, attn_implementation=impl)
    teacher, student = BertForMaskedLM(tcfg).cuda().eval(), BertForMaskedLM(scfg).cuda().train()
    for i in range(6):  # every other layer of the teacher
        student.bert.encoder.layer[i].load_state_dict(teacher.bert.encoder.layer[2 * i].state_dict())
    for p in teacher.parameters():
        p.requires_grad_(False)

    groups = [
        {
            "params": [p for n, p in student.named_parameters() if "bias" not in n and "LayerNorm" not in n],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in student.named_parameters() if "bias" in n or "LayerNorm" in n], "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=5e-4)
    loader = DataLoader(
        Corpus(args.per_gpu_batch_size * 6, tcfg.vocab_size, args.max_len),
        args.per_gpu_batch_size,
        shuffle=True,
        collate_fn=collate,
        pin_memory=True,
    )
    total = 0.0
    for batch in loader:
        batch = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}
        want = dict(output_hidden_states=True, output_attentions=args.alpha_att > 0)
        with torch.autocast("cuda", torch.bfloat16, enabled=args.fp16):
            with torch.no_grad():
                t = teacher(batch["input_ids"], attention_mask=batch["attention_mask"], **want)
            s = student(**batch, **want)
        keep = batch["attention_mask"].bool()
        s_log, t_log = s.logits[keep], t.logits[keep]
        ce = (
            F.kl_div(
                F.log_softmax(s_log / args.temperature, -1),
                F.softmax(t_log / args.temperature, -1),
                reduction="batchmean",
            )
            * args.temperature**2
        )
        loss = 5.0 * ce + 2.0 * s.loss
        if args.alpha_cos:
            sh, th = s.hidden_states[-1][keep], t.hidden_states[-1][keep]
            loss = loss + args.alpha_cos * F.cosine_embedding_loss(sh, th, torch.ones(sh.size(0), device=sh.device))
        if args.alpha_att:
            for i, a in enumerate(s.attentions):
                loss = loss + args.alpha_att * F.mse_loss(a, t.attentions[2 * i + 1])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        opt.step()
        total += loss.item()
        print(tuple(batch["input_ids"].shape), loss.item())


if __name__ == "__main__":
    main()
