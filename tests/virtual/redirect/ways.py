"""Forty-six ways in which training scripts write, change and delete files: python ways.py NAME, in a folder made by `prepare`.

Each checks that it reads what it wrote. Those in `WITH_TORCH` need torch and a (virtual) GPU; the others need neither.
"""

import csv
import json
import multiprocessing
import os
import pickle
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

ORIGINALS = {
    "model.pt": b"the real weights",
    "log.csv": b"step,loss\n1,2.5\n",
    "notes.txt": b"written by hand\n",
    "checkpoints/checkpoint-1/model.safetensors": b"the only checkpoint",
    "checkpoints/checkpoint-1/trainer_state.json": b'{"global_step": 1}',
    "data/part-0.bin": bytes(range(256)) * 64,
    "data/part-1.bin": bytes(4096),
}


def prepare(folder: Path) -> None:
    """Make the user's files."""
    for name, content in ORIGINALS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "latest").symlink_to("checkpoints/checkpoint-1")
    with sqlite3.connect(folder / "runs.db") as database:
        database.execute("CREATE TABLE run (name TEXT)")
        database.execute("INSERT INTO run VALUES ('real')")


def overwrite() -> None:
    Path("model.pt").write_bytes(b"new")
    assert Path("model.pt").read_bytes() == b"new"


def append() -> None:
    with open("log.csv", "a") as log:
        log.write("2,1.5\n")
    assert Path("log.csv").read_text() == "step,loss\n1,2.5\n2,1.5\n"


def write_csv() -> None:
    with open("log.csv", "r+", newline="") as log:
        rows = list(csv.reader(log))
        csv.writer(log).writerow([2, 1.5])
    assert len(rows) == 2
    assert len(list(csv.reader(open("log.csv")))) == 3


def open_exclusively() -> None:
    try:
        open("model.pt", "x")
    except FileExistsError:
        pass
    else:
        raise AssertionError("the file exists")
    with open("lock", "x"):
        pass
    os.remove("lock")
    assert not os.path.exists("lock")


def replace_by_temporary() -> None:
    Path("model.pt.tmp").write_bytes(b"complete")
    os.replace("model.pt.tmp", "model.pt")
    assert Path("model.pt").read_bytes() == b"complete"
    assert not os.path.exists("model.pt.tmp")


def rename_original() -> None:
    os.rename("model.pt", "model.old.pt")
    assert Path("model.old.pt").read_bytes() == ORIGINALS["model.pt"]
    assert "model.pt" not in os.listdir()
    Path("model.pt").write_bytes(b"new")
    assert Path("model.pt").read_bytes() == b"new"


def rename_folder() -> None:
    os.rename("checkpoints/checkpoint-1", "checkpoints/best")
    assert sorted(os.listdir("checkpoints")) == ["best"]
    assert Path("checkpoints/best/model.safetensors").read_bytes() == b"the only checkpoint"
    assert not os.path.exists("latest/model.safetensors")


def remove_tree() -> None:
    shutil.rmtree("checkpoints")
    assert not os.path.exists("checkpoints")
    os.makedirs("checkpoints/checkpoint-2")
    assert os.listdir("checkpoints") == ["checkpoint-2"]


def remove_and_write() -> None:
    os.remove("notes.txt")
    assert not os.path.exists("notes.txt")
    Path("notes.txt").write_text("again")
    os.unlink("notes.txt")
    assert "notes.txt" not in os.listdir()


def truncate() -> None:
    os.truncate("data/part-0.bin", 10)
    with open("data/part-1.bin", "r+b") as part:
        part.truncate(7)
    assert os.path.getsize("data/part-0.bin") == 10
    assert os.path.getsize("data/part-1.bin") == 7
    assert Path("data/part-0.bin").read_bytes() == bytes(range(10))


def write_inside() -> None:
    with open("data/part-0.bin", "r+b") as part:
        part.seek(256)
        part.write(b"patched")
    content = Path("data/part-0.bin").read_bytes()
    assert content[:256] == bytes(range(256))
    assert content[256:263] == b"patched"


def map_memory() -> None:
    import numpy as np

    mapped = np.memmap("data/part-0.bin", dtype=np.uint8, mode="r+")
    mapped[:4] = 9
    mapped.flush()
    assert Path("data/part-0.bin").read_bytes()[:5] == b"\t\t\t\t\x04"
    made = np.memmap("embeddings.bin", dtype=np.float32, mode="w+", shape=(1000, 64))
    made[3] = 1
    assert np.fromfile("embeddings.bin", dtype=np.float32).sum() == 64


def save_arrays() -> None:
    import numpy as np

    np.save("model.npy", np.arange(1000))
    np.savez("model.npz", a=np.ones(3))
    assert np.load("model.npy")[999] == 999
    assert np.load("model.npz")["a"].sum() == 3


def hdf5() -> None:
    import h5py

    with h5py.File("features.h5", "w") as file:
        file["x"] = range(100)
    with h5py.File("features.h5", "a") as file:
        file["y"] = 7
    with h5py.File("features.h5") as file:
        assert (file["x"][99], file["y"][()]) == (99, 7)


def sqlite() -> None:
    with sqlite3.connect("runs.db") as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("INSERT INTO run VALUES ('virtual')")
    database.close()
    database = sqlite3.connect("runs.db")
    assert [name for (name,) in database.execute("SELECT name FROM run")] == ["real", "virtual"]
    database.close()


def pickle_and_json() -> None:
    with open("state.pkl", "wb") as state:
        pickle.dump({"step": 3}, state)
    state_path = Path("checkpoints/checkpoint-1/trainer_state.json")
    state_path.write_text(json.dumps(json.loads(state_path.read_text()) | {"global_step": 2}))
    assert pickle.load(open("state.pkl", "rb")) == {"step": 3}
    assert json.loads(Path("latest/trainer_state.json").read_text())["global_step"] == 2


def archive() -> None:
    with zipfile.ZipFile("results.zip", "w") as made:
        made.write("notes.txt")
    shutil.make_archive("backup", "gztar", "data")
    assert zipfile.ZipFile("results.zip").read("notes.txt") == ORIGINALS["notes.txt"]
    shutil.unpack_archive("backup.tar.gz", "restored")
    assert sorted(os.listdir("restored")) == ["part-0.bin", "part-1.bin"]


def copy_files() -> None:
    shutil.copy2("model.pt", "data/part-0.bin")
    shutil.copytree("checkpoints", "copy")
    shutil.move("copy", "data/moved")
    assert Path("data/part-0.bin").read_bytes() == ORIGINALS["model.pt"]
    assert Path("data/moved/checkpoint-1/model.safetensors").exists()


def through_link() -> None:
    Path("latest/model.safetensors").write_bytes(b"changed")
    assert Path("checkpoints/checkpoint-1/model.safetensors").read_bytes() == b"changed"
    os.remove("latest")
    os.makedirs("checkpoints/checkpoint-2")
    os.symlink("checkpoints/checkpoint-2", "latest")
    Path("latest/model.safetensors").write_bytes(b"second")
    assert os.readlink("latest") == "checkpoints/checkpoint-2"
    assert Path("checkpoints/checkpoint-2/model.safetensors").read_bytes() == b"second"


def hard_link() -> None:
    os.link("model.pt", "best.pt")
    Path("best.pt").write_bytes(b"best")
    os.link("best.pt", "third.pt")
    assert Path("third.pt").read_bytes() == b"best"


def attributes() -> None:
    os.chmod("model.pt", 0o600)
    os.utime("notes.txt", (1, 1))
    Path("new.txt").write_text("x")
    os.chmod("new.txt", 0o640)
    assert os.stat("new.txt").st_mode & 0o777 == 0o640
    descriptor = os.open("data/part-0.bin", os.O_RDONLY)
    os.fchmod(descriptor, 0o600)
    os.utime(descriptor, (1, 1))
    os.close(descriptor)


def relative_to_folder() -> None:
    descriptor = os.open("checkpoints", os.O_RDONLY | os.O_DIRECTORY)
    made = os.open("new", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=descriptor)
    os.write(made, b"x")
    os.close(made)
    os.mkdir("folder", dir_fd=descriptor)
    os.rename("new", "folder/new", src_dir_fd=descriptor, dst_dir_fd=descriptor)
    assert sorted(os.listdir(descriptor)) == ["checkpoint-1", "folder"]
    assert Path("checkpoints/folder/new").read_bytes() == b"x"
    os.unlink("checkpoint-1/model.safetensors", dir_fd=descriptor)
    assert sorted(os.listdir("latest")) == ["trainer_state.json"]
    os.close(descriptor)


def change_folder() -> None:
    os.makedirs("runs/1")
    os.chdir("runs/1")
    Path("log").write_text("x")
    assert os.getcwd().endswith("/runs/1")
    assert Path.cwd().parent.name == "runs"
    os.chdir("../../data")
    Path("part-2.bin").write_bytes(b"x")
    assert sorted(os.listdir()) == ["part-0.bin", "part-1.bin", "part-2.bin"]


def walk() -> None:
    Path("data/part-2.bin").write_bytes(b"x")
    os.remove("data/part-0.bin")
    found = sorted(str(path) for path in Path(".").rglob("*.bin"))
    assert found == ["data/part-1.bin", "data/part-2.bin"]
    assert sorted(name for _, _, names in os.walk("data") for name in names) == ["part-1.bin", "part-2.bin"]
    with os.scandir("data") as entries:
        assert all(entry.is_file(follow_symlinks=False) for entry in entries)


def copy_by_command() -> None:
    subprocess.run(["cp", "model.pt", "log.csv"], check=True)
    assert Path("log.csv").read_bytes() == ORIGINALS["model.pt"]


def shell() -> None:
    subprocess.run(
        "rm -r data; mkdir out; echo done > out/status; mv notes.txt out; sed -i s/hand/sed/ out/notes.txt",
        shell=True,
        check=True,
    )
    assert sorted(os.listdir("out")) == ["notes.txt", "status"]
    assert Path("out/notes.txt").read_text() == "written by sed\n"
    listed = subprocess.run(["ls"], capture_output=True, text=True, check=True).stdout.split()
    assert "data" not in listed
    assert "out" in listed


def shell_without_environment() -> None:
    subprocess.run(["/bin/sh", "-c", "echo x > model.pt; /bin/rm log.csv"], env={}, check=True)
    assert Path("model.pt").read_text() == "x\n"
    assert not os.path.exists("log.csv")
    os.system("echo y >> model.pt")
    assert Path("model.pt").read_text() == "x\ny\n"


def python_child() -> None:
    code = "import json, os; json.dump({'a': 1}, open('child.json', 'w')); os.remove('notes.txt')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert json.loads(Path("child.json").read_text()) == {"a": 1}
    assert not os.path.exists("notes.txt")


def _write_rank(rank: int) -> None:
    Path(f"rank-{rank}.txt").write_text(str(rank))
    with open("log.csv", "a") as log:
        log.write(f"{rank}\n")


def forked_workers() -> None:
    _in_processes("fork")


def spawned_workers() -> None:
    _in_processes("spawn")


def _in_processes(method: str) -> None:
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=_write_rank, args=(rank,)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert [Path(f"rank-{rank}.txt").read_text() for rank in range(2)] == ["0", "1"]
    assert sorted(Path("log.csv").read_text().split()) == ["0", "1", "1,2.5", "step,loss"]


def threads() -> None:
    workers = [threading.Thread(target=_write_rank, args=(rank,)) for rank in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(Path("log.csv").read_text().split()) == 10


def temporary_files() -> None:
    with tempfile.NamedTemporaryFile(dir=".", suffix=".pt") as file:
        file.write(b"x")
        file.flush()
        assert Path(file.name).read_bytes() == b"x"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x").write_text("x")
        assert os.listdir(folder) == ["x"]
    assert not os.path.exists(folder)


def socket_file() -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("monitor.sock")
        server.listen()
        client.connect("monitor.sock")
        client.sendall(b"x")
        accepted, _ = server.accept()
        assert accepted.recv(1) == b"x"
        accepted.close()
    os.unlink("monitor.sock")


def log_to_file() -> None:
    import logging

    logging.basicConfig(filename="log.csv", level=logging.INFO, format="%(message)s")
    logging.info("3,0.5")
    logging.shutdown()
    assert Path("log.csv").read_text().endswith("3,0.5\n")


WITHOUT_TORCH = [
    overwrite, append, write_csv, open_exclusively, replace_by_temporary, rename_original, rename_folder, remove_tree,
    remove_and_write, truncate, write_inside, map_memory, save_arrays, hdf5, sqlite, pickle_and_json, archive, copy_files,
    through_link, hard_link, attributes, relative_to_folder, change_folder, walk, copy_by_command, shell,
    shell_without_environment, python_child, forked_workers, spawned_workers, threads, temporary_files, socket_file,
    log_to_file,
]  # fmt: skip


# With torch


def torch_save() -> None:
    import torch

    model = torch.nn.Linear(600, 600).cuda()
    torch.save(model.state_dict(), "model.pt")
    with open("checkpoints/checkpoint-1/optimizer.pt", "wb") as file:
        torch.save({"step": 3}, file)
    loaded = torch.load("model.pt", map_location="cuda")
    model.load_state_dict(loaded)
    assert loaded["weight"].shape == (600, 600)
    assert torch.load("latest/optimizer.pt") == {"step": 3}


def torchscript() -> None:
    import torch

    torch.jit.script(torch.nn.Linear(8, 8)).save("model.pt")
    assert torch.jit.load("model.pt")(torch.ones(1, 8)).shape == (1, 8)


def safetensors() -> None:
    import torch
    from safetensors.torch import load_file, save_file

    save_file({"w": torch.ones(700, 700, device="cuda")}, "latest/model.safetensors")
    assert load_file("checkpoints/checkpoint-1/model.safetensors")["w"].shape == (700, 700)


def _tiny_gpt():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16))


def trainer() -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    arguments = TrainingArguments(
        "checkpoints", save_steps=1, save_total_limit=1, max_steps=3, per_device_train_batch_size=2, report_to=[],
        logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    Trainer(_tiny_gpt(), arguments, train_dataset=rows).train()
    assert os.listdir("checkpoints") == ["checkpoint-3"]
    Trainer(_tiny_gpt(), arguments, train_dataset=rows).train(resume_from_checkpoint=True)


def lightning() -> None:
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: object, index: int) -> object:
            loss = self.layer(batch).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> object:
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=2)
    made = lightning.Trainer(
        max_epochs=2, default_root_dir="checkpoints", log_every_n_steps=1, enable_progress_bar=False
    )
    made.fit(Model(), loader)
    (kept,) = Path("checkpoints").rglob("*.ckpt")
    Model.load_from_checkpoint(kept)


def accelerate() -> None:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state("checkpoints/checkpoint-1")
    accelerator.load_state("checkpoints/checkpoint-1")
    assert "model.safetensors" in os.listdir("latest")


def deepspeed() -> None:
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_init_required=False)
    model = torch.nn.Linear(8, 8)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        },
    )  # fmt: skip
    engine.backward(engine(torch.ones(1, 8, device="cuda", dtype=torch.bfloat16)).sum())
    engine.step()
    engine.save_checkpoint("checkpoints")
    tag = Path("checkpoints/latest").read_text()
    assert "mp_rank_00_model_states.pt" in os.listdir(f"checkpoints/{tag}")
    folder, _ = engine.load_checkpoint("checkpoints")
    assert folder is not None
    dist.destroy_process_group()


def distributed_checkpoint() -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"model": torch.nn.Linear(8, 8).cuda().state_dict()}
    dcp.save(state, checkpoint_id="checkpoints/checkpoint-1")
    dcp.load(state, checkpoint_id="checkpoints/checkpoint-1")
    assert any(name.endswith(".distcp") for name in os.listdir("latest"))


def tensorboard() -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter("runs") as writer:
        writer.add_scalar("loss", 1.0, 1)
    assert os.listdir("runs")


def data_workers() -> None:
    import torch

    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
    assert len(list(loader)) == 4
    assert sorted(path.name for path in Path().glob("row-*")) == [f"row-{index}" for index in range(4)]


class Rows:
    """A data set that keeps a cache of its rows."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        Path(f"row-{index}").write_text("cached")
        return index


def pretrained() -> None:
    model = _tiny_gpt().cuda()
    model.save_pretrained("latest")
    assert type(model).from_pretrained("checkpoints/checkpoint-1").config.n_embd == 32


def at_exit() -> None:
    import atexit

    import torch

    model = torch.nn.Linear(8, 8).cuda()
    atexit.register(lambda: torch.save(model.state_dict(), "model.pt"))


WITH_TORCH = [
    torch_save, torchscript, safetensors, trainer, lightning, accelerate, deepspeed, distributed_checkpoint, tensorboard, data_workers,
    pretrained, at_exit,
]  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1:2] == ["--without-torch"]:
        from tonnage.virtual.redirect import Redirection

        with Redirection() as redirection:
            globals()[sys.argv[2]]()
        assert redirection.writes is not None
        print(len(redirection.writes.files))
    else:
        for name in sys.argv[1:]:
            globals()[name]()
