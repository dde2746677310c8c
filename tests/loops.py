"""Small scripts as people write them, each with one thing wrong; the lines that are guilty say so."""

import gc
from collections import deque
from pathlib import Path
from typing import Any

import tonnage
from tonnage.recording import Recording

BATCH = 2048


def recorded(script: Any, *, gpu: str = "h200", **options: Any) -> Recording:
    """The script's recording on a virtual GPU."""
    with tonnage.virtual_gpu(gpu, torch="2.11") as card:
        kept = script(**options)
        recording = card.recording
        recording.header.script = __file__
        del kept
        return recording


def line_of(mark: str) -> str:
    """ "loops.py:42": the line that ends with this comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{Path(__file__).name}:{number}"


def model_and_optimizer(**options: Any) -> Any:
    import torch

    layers = [torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)]
    model = torch.nn.Sequential(*layers, *(torch.nn.Linear(512, 512) for _ in range(6))).cuda()
    return model, torch.optim.AdamW(model.parameters(), **options)


def batch() -> Any:
    import torch

    return torch.randn(BATCH, 512, device="cuda")


def healthy(steps: int = 5) -> None:
    model, optimizer = model_and_optimizer()
    for _ in range(steps):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def keeps_graph(steps: int = 4) -> Any:
    model, optimizer = model_and_optimizer()
    losses = []
    for _ in range(steps):
        loss = model(batch()).square().mean()
        losses.append(loss)  # keeps the graph
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def keeps_outputs(steps: int = 5) -> Any:
    import torch

    model, _ = model_and_optimizer()
    predictions = []
    for _ in range(steps):
        with torch.no_grad():
            answer = model(batch())
        predictions.append(answer)  # keeps the output
    return predictions


def keeps_by_hook(steps: int = 5) -> Any:
    model, optimizer = model_and_optimizer()
    features = []

    def remember(module: Any, given: Any, output: Any) -> None:
        features.append(output.detach())  # keeps by hook

    model[1].register_forward_hook(remember)
    for _ in range(steps):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return features


def keeps_in_cycle(steps: int = 18) -> None:
    import torch

    class Result:
        pass

    model, _ = model_and_optimizer()
    gc.disable()
    try:
        for step in range(steps):
            result = Result()
            result.itself = result
            with torch.no_grad():
                result.answer = model(batch())
            del result
            if step % 6 == 5:
                gc.collect()
    finally:
        gc.enable()


def keeps_a_window(steps: int = 12) -> Any:
    import torch

    model, _ = model_and_optimizer()
    window: deque[Any] = deque(maxlen=3)
    for _ in range(steps):
        with torch.no_grad():
            window.append(model(batch()))
    return window


def keeps_gradients(steps: int = 3) -> None:
    model, optimizer = model_and_optimizer()
    for _ in range(steps):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def keeps_data(steps: int = 4) -> Any:
    import torch

    model, optimizer = model_and_optimizer()
    data = torch.randn(40 * BATCH, 512, device="cuda")  # keeps the data
    for step in range(steps):
        model(data[step * BATCH : (step + 1) * BATCH]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return data


def grows_a_cache(steps: int = 24) -> Any:
    import torch

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(512, 1024)
            self.cache = torch.empty(64, 0, 1024, device="cuda")

        def forward(self, x: Any) -> Any:
            self.cache = torch.cat([self.cache, self.projection(x)], dim=1)  # grows the cache
            return x

    model = Decoder().cuda()
    with torch.no_grad():
        for _ in range(steps):
            model(torch.randn(64, 16, 512, device="cuda"))
    return model


def attends(steps: int = 2, length: int = 1024) -> None:
    import torch

    class Attention(torch.nn.Module):
        def forward(self, q: Any) -> Any:
            scores = q @ q.transpose(-2, -1)
            return torch.softmax(scores, dim=-1) @ q  # attends

    model, _ = model_and_optimizer()
    attention = Attention()
    for _ in range(steps):
        hidden = model(torch.randn(2, length, 512, device="cuda"))
        attention(hidden.view(2, length, 8, 64).transpose(1, 2)).square().mean().backward()


def projects_to_a_vocabulary(steps: int = 2) -> None:
    import torch

    head = torch.nn.Linear(256, 32000).cuda()
    for _ in range(steps):
        logits = head(torch.randn(4, 256, 256, device="cuda"))
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.zeros(1024, dtype=torch.long, device="cuda")
        ).backward()  # loss
        head.zero_grad()


def steps_with_lists(steps: int = 2) -> None:
    import torch

    model = torch.nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(steps):
        model(torch.randn(8, 4096, device="cuda")).sum().backward()
        optimizer.step()  # steps
        optimizer.zero_grad()


def tries_kernels_out(steps: int = 3) -> None:
    import torch

    model, _ = model_and_optimizer()
    for step in range(steps):
        with torch.no_grad():
            model(batch())
        if not step:
            torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")  # tries


def varies_lengths(steps: int = 40) -> Any:
    import torch

    model, _ = model_and_optimizer()
    kept = []
    with torch.no_grad():
        for step in range(steps):
            x = torch.randn(4096 + 1111 * step, 512, device="cuda")
            y = model[0](x)  # varies
            if step % 3 == 0:
                kept.append(torch.empty(700_000 + 7000 * step, device="cuda"))
            del x, y
    return kept


def trained(steps: int = 3) -> Any:
    """A model that has trained, with its optimizer."""
    model, optimizer = model_and_optimizer()
    for _ in range(steps):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def evaluates(batches: int = 24) -> None:
    import torch

    model, _ = trained()
    model.eval()
    with torch.no_grad():
        for _ in range(batches):
            model(batch())


def evaluates_and_keeps(batches: int = 24) -> Any:
    import torch

    model, _ = trained()
    model.eval()
    outputs = []
    with torch.no_grad():
        for _ in range(batches):
            outputs.append(model(batch()))  # keeps the predictions
    return torch.cat(outputs)


def evaluates_and_joins(batches: int = 24) -> Any:
    import torch

    model, _ = trained()
    model.eval()
    outputs = None
    with torch.no_grad():
        for _ in range(batches):
            output = model(batch())
            outputs = output if outputs is None else torch.cat((outputs, output))  # joins the predictions
    return outputs


def evaluates_with_gradients(batches: int = 3, no_grad: bool = False) -> None:
    import torch

    model, _ = trained()
    model.eval()
    for _ in range(batches):
        with torch.set_grad_enabled(not no_grad):
            model(torch.randn(8 * BATCH, 512, device="cuda"))


def evaluates_beside_gradients() -> None:
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(32768, 2048, device="cuda"))


def saves_copies(folder: Path) -> None:
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    model.register_state_dict_post_hook(
        lambda _, state, prefix, local: state.update({k: v.double() for k, v in state.items()})  # saves copies
    )
    model(torch.randn(16, 2048, device="cuda"))
    torch.save(model.state_dict(), folder / "model.pt")


def resumes(folder: Path, where: str) -> None:
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        if step == 2:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")
            optimizer.state.clear()
            checkpoint = torch.load(folder / "last.pt", map_location=where)  # loads the checkpoint
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        model(torch.randn(16, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fetches_ahead(ahead: int = 4) -> None:
    import torch

    model, optimizer = model_and_optimizer()
    waiting: deque[Any] = deque()
    for _ in range(8):
        while len(waiting) < ahead:
            waiting.append(torch.randn(8 * BATCH, 512).to("cuda", non_blocking=True))  # fetches ahead
        model(waiting.popleft()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def generates(tokens: int = 96) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).cuda().eval()
    prompt = torch.ones(64, 32, dtype=torch.long, device="cuda")
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)


def loads_weights(layers: int = 12) -> Any:
    """Two tensors of each layer, as a loader without a module brings them."""
    import torch

    state = []
    for _ in range(layers):
        weight = torch.empty(512, 512, device="cuda")
        bias = torch.zeros(64, 512, device="cuda")
        state.append((weight.normal_(), bias))
    return state


def loads_shards(shards: int = 6) -> Any:
    """Tensors of the host, moved and cast shard by shard."""
    import torch

    state = {}
    for shard in range(shards):
        for part in range(4):
            moved = torch.zeros(512, 512).to("cuda")
            state[shard, part] = moved.to(torch.bfloat16)
    return state


def generates_with_scores(tokens: int = 24) -> Any:
    """One call that keeps the logits of all its tokens, as many as it may make."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 8192}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = LlamaForCausalLM(config).cuda().eval()
    prompt = torch.ones(16, 32, dtype=torch.long, device="cuda")
    mask = torch.ones_like(prompt)
    options = {"output_scores": True, "return_dict_in_generate": True, "do_sample": False}
    return model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, **options)


def grows_a_cache_in_a_list(steps: int = 24) -> Any:
    """Keys of every token in a list, joined at every token."""
    import torch

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(512, 1024)
            self.keys: list[Any] = []

        def forward(self, x: Any) -> Any:
            self.keys.append(self.projection(x))  # grows a list
            return x + torch.cat(self.keys, dim=1).mean(dim=1, keepdim=True)[..., :512]

    model = Decoder().cuda()
    with torch.no_grad():
        for _ in range(steps):
            model(torch.randn(64, 4, 512, device="cuda"))
    return model


def keeps_at_first(steps: int = 16) -> Any:
    """Three iterations that keep something, as a survey before a training does, and none after them."""
    model, optimizer = model_and_optimizer()
    survey = []
    for step in range(steps):
        outputs = model(batch())
        if step < 3:
            survey.append(outputs.detach().clone())
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return survey


def fills_a_replay(steps: int = 8) -> Any:
    model, optimizer = model_and_optimizer()
    replay = []
    for _ in range(steps):
        replay.append(batch())  # fills the replay
        loss = model(replay[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return replay


def logs_outputs(steps: int = 22) -> Any:
    model, optimizer = model_and_optimizer()
    logged = []
    for step in range(steps):
        outputs = model(batch())
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            logged.append(outputs.detach())
    return logged
