"""Compiled training as frameworks switch it on: transformers' Trainer, accelerate, Lightning."""
import argparse
import tempfile

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--framework", default="trainer", choices=["trainer", "accelerate", "lightning"])
p.add_argument("--mode", default="default")
p.add_argument("--layers", type=int, default=4)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=1024)
p.add_argument("--accumulate", type=int, default=1)
args = p.parse_args()


class Tokens(Dataset):
    def __len__(self):
        return args.batch * args.accumulate * 4

    def __getitem__(self, i):
        ids = torch.randint(0, 32000, (args.seq,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
    "qwen2", vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=args.layers, num_attention_heads=12,
    num_key_value_heads=2, use_cache=False))

if args.framework == "trainer":
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate,
        max_steps=4, bf16=True, torch_compile=True, torch_compile_mode=args.mode, report_to=[], save_strategy="no",
        logging_steps=1, optim="adamw_torch_fused", dataloader_pin_memory=True)
    print(Trainer(model=model, args=arguments, train_dataset=Tokens()).train().training_loss)

elif args.framework == "accelerate":
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accumulate,
                              dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode=args.mode))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Tokens(), batch_size=args.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(loss.item())

else:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def training_step(self, batch, _):
            return self.inner(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trainer = L.Trainer(max_steps=4, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False, enable_checkpointing=False,
                        accumulate_grad_batches=args.accumulate, enable_model_summary=False, enable_progress_bar=False)
    trainer.fit(torch.compile(Module(model), mode=args.mode), DataLoader(Tokens(), batch_size=args.batch))
