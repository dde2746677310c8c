"""Trains a small language model on samples of many lengths, as people do: `python benchmarks/certify/text.py --kind causal`.

Weights and tokens are random; lengths follow a seed. With `--cap GIB` the process may hold no more than that.
"""

import argparse
import copy
import random
from contextlib import nullcontext

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

WIDTHS = {"small": (384, 6, 6), "medium": (640, 8, 10), "large": (1024, 10, 16)}
parser = argparse.ArgumentParser()
add = parser.add_argument
add("--kind", choices=("causal", "gpt2", "encoder", "seq2seq"), default="causal")
add("--size", choices=tuple(WIDTHS), default="small")
add("--vocab", type=int, default=32000)
add("--samples", type=int, default=640)
add("--batch", type=int, default=8)
add("--epochs", type=int, default=1)
add("--mean", type=float, default=5.3, help="of the logarithm of lengths")
add("--spread", type=float, default=0.8)
add("--longest", type=int, default=2048)
add("--multiple", type=int, default=1, help="pad to a multiple of this")
add("--batching", choices=("plain", "sorted", "budget", "packed", "growing"), default="plain")
add("--budget", type=int, default=8192)
add("--accumulate", type=int, default=1)
add("--precision", choices=("fp32", "autocast", "bf16", "fp16"), default="autocast")
add("--optimizer", choices=("adamw", "fused", "sgd", "adafactor"), default="adamw")
add("--checkpointing", action="store_true")
add("--attention", default="sdpa")
add("--lora", type=int, default=0)
add("--clip", type=float, default=0.0)
add("--eval-every", type=int, default=0)
add("--eval-batch", type=int, default=16)
add("--keep-logits", action="store_true", help="an evaluation keeps its logits on the GPU")
add("--save-every", type=int, default=0, help="a copy of model and optimizer on the GPU before it is written")
add("--ema", action="store_true")
add("--keep-losses", type=int, default=0, help="keep every so manieth loss with its graph")
add("--drop-last", action="store_true")
add("--seed", type=int, default=0)
add("--cap", type=float, default=0.0, metavar="GIB")
options = parser.parse_args()


class Samples(Dataset):
    def __init__(self, count, seed):
        draw = random.Random(seed)
        lengths = [int(draw.lognormvariate(options.mean, options.spread)) for _ in range(count)]
        self.lengths = [min(max(length, 4), options.longest) for length in lengths]
        if options.batching == "growing":
            self.lengths = [min(64 + 32 * (at // (2 * options.batch)), options.longest) for at in range(count)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, at):
        draw = torch.Generator().manual_seed(at)
        return torch.randint(3, options.vocab, (self.lengths[at],), generator=draw)


def padded(samples):
    longest = max(map(len, samples))
    longest = -(-longest // options.multiple) * options.multiple
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)], mask[row, : len(sample)] = sample, 1
    if options.kind == "encoder":
        return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}
    labels = ids.masked_fill(mask == 0, -100)
    if options.kind == "seq2seq":
        cut = max(longest // 3, 1)
        return {"input_ids": ids[:, cut:], "attention_mask": mask[:, cut:], "labels": labels[:, :cut].contiguous()}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(samples):
    ids = torch.cat(samples)[None]
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def batches(data):
    order = list(range(len(data)))
    random.Random(options.seed + 1).shuffle(order)
    if options.batching in ("plain", "growing"):
        return None
    if options.batching == "sorted":
        order.sort(key=lambda at: data.lengths[at])
        found = [order[at : at + options.batch] for at in range(0, len(order), options.batch)]
        random.Random(options.seed + 2).shuffle(found)
        return found
    found, row = [], []
    for at in order:
        tokens = sum(data.lengths[one] for one in row) + data.lengths[at]
        widest = max(data.lengths[one] for one in [*row, at]) * (len(row) + 1)
        if row and (tokens if options.batching == "packed" else widest) > options.budget:
            found.append(row)
            row = []
        row.append(at)
    return [*found, row]


def make_model():
    torch.manual_seed(options.seed)
    width, layers, heads = WIDTHS[options.size]
    if options.kind == "causal":
        config = AutoConfig.for_model(
            "llama", hidden_size=width, intermediate_size=width * 3, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads // 2, vocab_size=options.vocab, max_position_embeddings=8192,
        )  # fmt: skip
        make = AutoModelForCausalLM
    elif options.kind == "gpt2":
        config = AutoConfig.for_model(
            "gpt2", n_embd=width, n_layer=layers, n_head=heads, vocab_size=options.vocab, n_positions=8192
        )
        make = AutoModelForCausalLM
    elif options.kind == "encoder":
        config = AutoConfig.for_model(
            "bert", hidden_size=width, intermediate_size=width * 4, num_hidden_layers=layers, num_attention_heads=heads,
            vocab_size=options.vocab, max_position_embeddings=8192,
        )  # fmt: skip
        make = AutoModelForSequenceClassification
    else:
        config = AutoConfig.for_model(
            "t5", d_model=width, d_ff=width * 3, num_layers=layers, num_heads=heads, d_kv=width // heads,
            vocab_size=options.vocab, decoder_start_token_id=0,
        )  # fmt: skip
        make = AutoModelForSeq2SeqLM
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    chosen = {} if options.kind == "seq2seq" else {"attn_implementation": options.attention}
    model = make.from_config(config, dtype=dtype, **chosen)
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=options.lora, target_modules="all-linear"))
    return model.cuda()


def make_optimizer(model):
    trained = [one for one in model.parameters() if one.requires_grad]
    if options.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    if options.optimizer == "adafactor":
        return torch.optim.Adafactor(trained, lr=1e-3)
    return torch.optim.AdamW(trained, lr=1e-4, fused=options.optimizer == "fused")


def half():
    kinds = {"autocast": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast("cuda", kinds[options.precision]) if options.precision in kinds else nullcontext()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    kept, total = [], 0.0
    for batch in loader:
        batch = {name: value.cuda() for name, value in batch.items()}
        with half():
            output = model(**batch)
        total += output.loss.item()
        if options.keep_logits:
            kept.append(output.logits[:, -1].float() if options.kind == "encoder" else output.logits.argmax(-1))
    model.train()
    return total / len(loader)


def main():
    if options.cap:
        torch.cuda.set_per_process_memory_fraction(options.cap * 2**30 / torch.cuda.mem_get_info()[1])
    model = make_model()
    model.train()
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cuda", enabled=options.precision == "fp16")
    average = copy.deepcopy(model).eval().requires_grad_(False) if options.ema else None
    data, held_out = Samples(options.samples, options.seed), Samples(96, options.seed + 99)
    collate = packed if options.batching == "packed" else padded
    groups = batches(data)
    if groups is not None:
        loader = DataLoader(data, batch_sampler=groups, collate_fn=collate)
    else:
        shuffled = torch.Generator().manual_seed(options.seed) if options.batching == "plain" else None
        loader = DataLoader(
            data,
            options.batch,
            shuffle=shuffled is not None,
            generator=shuffled,
            collate_fn=collate,
            drop_last=options.drop_last,
        )
    validation = DataLoader(held_out, options.eval_batch, collate_fn=padded)
    step, losses = 0, []
    for _epoch in range(options.epochs):
        for batch in loader:
            step += 1
            batch = {name: value.to("cuda") for name, value in batch.items()}
            with half():
                loss = model(**batch).loss / options.accumulate
            scaler.scale(loss).backward()
            if step % options.accumulate == 0:
                if options.clip:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if average is not None:
                    for kept, one in zip(average.parameters(), model.parameters(), strict=True):
                        kept.lerp_(one, 0.001)
            if options.keep_losses and step % options.keep_losses == 0:
                losses.append(loss)
            print(f"step {step}", flush=True)
            if options.eval_every and step % options.eval_every == 0:
                evaluate(model, validation)
                print(f"evaluated after step {step}", flush=True)
            if options.save_every and step % options.save_every == 0:
                state = {name: value.clone() for name, value in model.state_dict().items()}
                states = copy.deepcopy(optimizer.state_dict())
                del state, states
                print(f"saved after step {step}", flush=True)
    print("done", flush=True)


main()
