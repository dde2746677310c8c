# Kaggle: DeBERTa-v3 regression + AWP + multi-sample dropout + LLRD. (cv 0.451 lb 0.44)
try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import gc, os, random, sys, time
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import Dataset, DataLoader
from transformers import DebertaV2Config, DebertaV2Model


class CFG:
    seed = 42
    max_len = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    batch_size = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    awp = "awp" in sys.argv
    gradient_checkpointing = "gc" in sys.argv
    apex = True
    n_fold = 2
    n_accumulate = 1
    encoder_lr = 2e-5
    decoder_lr = 2e-5
    layers = 12
    steps = 4


def seed_everything(seed=42):
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)
    torch.backends.cudnn.deterministic = True


seed_everything(CFG.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TrainDataset(Dataset):
    def __init__(self, n):
        self.lens = np.clip(np.random.lognormal(5.6, 0.5, n).astype(int), 16, CFG.max_len)

    def __len__(self):
        return len(self.lens)

    def __getitem__(self, i):
        ids = np.zeros(CFG.max_len, dtype=np.int64)
        m = np.zeros(CFG.max_len, dtype=np.int64)
        ids[: self.lens[i]] = np.random.randint(3, 120000, self.lens[i])
        m[: self.lens[i]] = 1
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(m)}, torch.rand(6)


def collate(inputs):  # cut to the longest of the batch
    mask_len = int(inputs["attention_mask"].sum(axis=1).max())
    for k, v in inputs.items():
        inputs[k] = inputs[k][:, :mask_len]
    return inputs


class AttentionPooling(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d), nn.GELU(), nn.Linear(d, 1))

    def forward(self, h, mask):
        w = self.attention(h).float()
        w[mask == 0] = float("-inf")
        w = torch.softmax(w, 1)
        return torch.sum(w * h, dim=1)


class CustomModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = DebertaV2Config(
            vocab_size=128100,
            hidden_size=768,
            num_hidden_layers=CFG.layers,
            num_attention_heads=12,
            intermediate_size=3072,
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            layer_norm_eps=1e-7,
            max_relative_positions=-1,
            position_biased_input=False,
            type_vocab_size=0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = DebertaV2Model(self.config)
        if CFG.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.pool = AttentionPooling(768)
        self.drops = nn.ModuleList([nn.Dropout(0.1 * i) for i in range(1, 6)])
        self.fc = nn.Linear(768, 6)

    def forward(self, inputs):
        h = self.model(**inputs)[0]
        f = self.pool(h, inputs["attention_mask"])
        return sum(self.fc(d(f)) for d in self.drops) / 5


class AWP:
    def __init__(self, model, adv_lr=1e-4, adv_eps=1e-2):
        self.model, self.adv_lr, self.adv_eps, self.backup = model, adv_lr, adv_eps, {}

    def perturb(self):
        for name, p in self.model.named_parameters():
            if p.requires_grad and p.grad is not None and "weight" in name:
                n1, n2 = torch.norm(p.grad), torch.norm(p.data.detach())
                if n1 != 0 and not torch.isnan(n1):
                    self.backup[name] = p.data.clone()
                    p.data.add_(self.adv_lr * p.grad / (n1 + 1e-6) * (n2 + 1e-6))
                    eps = self.adv_eps * self.backup[name].abs()
                    p.data = torch.min(torch.max(p.data, self.backup[name] - eps), self.backup[name] + eps)

    def restore(self):
        for name, p in self.model.named_parameters():
            if name in self.backup:
                p.data = self.backup[name]
        self.backup = {}


def get_optimizer_params(model):
    out = [
        {
            "params": [p for n, p in model.named_parameters() if "model" not in n],
            "lr": CFG.decoder_lr,
            "weight_decay": 0.0,
        }
    ]
    lr = CFG.encoder_lr
    for layer in [*reversed(model.model.encoder.layer), model.model.embeddings]:
        out.append({"params": [p for p in layer.parameters()], "lr": lr, "weight_decay": 0.01})
        lr *= 0.9
    return out


def train_fold(fold):
    ds = TrainDataset(CFG.batch_size * CFG.steps)
    loader = DataLoader(ds, batch_size=CFG.batch_size, shuffle=True, num_workers=0, pin_memory=True, drop_last=True)
    model = CustomModel()
    model.to(device)
    optimizer = torch.optim.AdamW(get_optimizer_params(model), lr=CFG.encoder_lr, eps=1e-6)
    scaler = torch.amp.GradScaler("cuda", enabled=CFG.apex)
    criterion = nn.SmoothL1Loss(reduction="none")
    awp = AWP(model)
    for step, (inputs, labels) in enumerate(loader):
        inputs = collate(inputs)
        for k, v in inputs.items():
            inputs[k] = v.to(device)
        labels = labels.to(device)
        with torch.amp.autocast("cuda", enabled=CFG.apex):
            loss = criterion(model(inputs), labels).mean()
        scaler.scale(loss).backward()
        if CFG.awp and step > 0:
            awp.perturb()
            with torch.amp.autocast("cuda", enabled=CFG.apex):
                adv = criterion(model(inputs), labels).mean()
            optimizer.zero_grad()
            scaler.scale(adv).backward()
            awp.restore()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"fold {fold} step {step} len {inputs['input_ids'].shape[1]} loss {loss.item():.4f}")
    model.eval()
    preds = []
    for inputs, _ in loader:
        inputs = {k: v.to(device) for k, v in collate(inputs).items()}
        with torch.no_grad():
            preds.append(model(inputs).sigmoid().to("cpu").numpy())
    torch.cuda.empty_cache()
    gc.collect()
    return np.concatenate(preds)


if __name__ == "__main__":
    for fold in range(CFG.n_fold):
        print(train_fold(fold).mean())
        gc.collect()
        torch.cuda.empty_cache()
