"""Fine-tune Whisper or a Wav2Vec2 CTC model on utterances of different lengths, bucketed by length."""

try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse
import random

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, WhisperConfig, WhisperForConditionalGeneration

SR = 16000


class Utterances(Dataset):
    def __init__(self, n, seconds, seed=0):
        rng = random.Random(seed)
        self.lengths = [int(SR * rng.uniform(1.0, seconds)) for _ in range(n)]
        self.words = [rng.randint(5, 5 + int(length / SR * 4)) for length in self.lengths]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(self.lengths[i], generator=g), torch.randint(1, 31, (self.words[i],), generator=g)


class BucketSampler(Sampler):
    """Batches with at most so many seconds after padding."""

    def __init__(self, lengths, max_seconds):
        self.batches, batch = [], []
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and lengths[i] * (len(batch) + 1) > max_seconds * SR:
                self.batches.append(batch)
                batch = []
            batch.append(i)
        self.batches.append(batch)
        random.Random(1).shuffle(self.batches)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def collate(items):
    wav = torch.nn.utils.rnn.pad_sequence([w for w, _ in items], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(w), dtype=torch.long) for w, _ in items], batch_first=True)
    lab = torch.nn.utils.rnn.pad_sequence([t for _, t in items], batch_first=True, padding_value=-100)
    return wav, mask, lab


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--arch", default="wav2vec2", choices=["wav2vec2", "whisper"])
    ap.add_argument("--seconds", type=float, default=15)
    ap.add_argument("--batch-seconds", type=float, default=120)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--freeze", action="store_true")
    ap.add_argument("--precision", default="fp16", choices=["fp16", "bf16", "fp32"])
    a = ap.parse_args()
    torch.manual_seed(0)
    if a.arch == "wav2vec2":
        cfg = Wav2Vec2Config(
            vocab_size=32, ctc_loss_reduction="mean", mask_time_prob=0.0, layerdrop=0.0, pad_token_id=0
        )
        model = Wav2Vec2ForCTC(cfg).cuda()
        if a.freeze:
            model.freeze_feature_encoder()
    else:
        cfg = WhisperConfig(
            d_model=768,
            encoder_layers=12,
            decoder_layers=12,
            encoder_attention_heads=12,
            decoder_attention_heads=12,
            encoder_ffn_dim=3072,
            decoder_ffn_dim=3072,
        )
        model = WhisperForConditionalGeneration(cfg).cuda()
        if a.freeze:
            model.freeze_encoder()
    model.train()
    data = Utterances(96, a.seconds)
    if a.arch == "wav2vec2":
        loader = DataLoader(
            data, batch_sampler=BucketSampler(data.lengths, a.batch_seconds), collate_fn=collate, pin_memory=True
        )
    else:
        loader = DataLoader(data, batch_size=a.batch, collate_fn=collate, pin_memory=True, drop_last=True)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, foreach=False)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[a.precision]
    scaler = torch.amp.GradScaler("cuda", enabled=a.precision == "fp16")
    for n, (wav, mask, labels) in enumerate(loader):
        wav, mask, labels = (t.to("cuda", non_blocking=True) for t in (wav, mask, labels))
        with torch.autocast("cuda", dtype, enabled=a.precision != "fp32"):
            if a.arch == "wav2vec2":
                loss = model(wav, attention_mask=mask, labels=labels).loss
            else:  # spectrogram on the GPU, padded to 30 s
                wav = torch.nn.functional.pad(wav, (0, 30 * SR - wav.shape[1]))
                spec = torch.stft(
                    wav.float(), 400, 160, window=torch.hann_window(400, device="cuda"), return_complex=True
                )
                power = spec[..., :-1].abs() ** 2
                mel = torch.rand(80, 201, device="cuda") @ power
                logmel = torch.clamp(mel, min=1e-10).log10()
                loss = model(input_features=(logmel + 4) / 4, labels=labels).loss
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        print(n, tuple(wav.shape), loss.item())
        if n == 7:
            break


if __name__ == "__main__":
    main()
