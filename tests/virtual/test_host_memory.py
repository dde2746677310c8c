"""The host's memory of a run, as it is counted on a virtual GPU and as Linux measures it in a plain process."""

import json
import mmap
import subprocess
import sys
from functools import cache

import pytest

import cuda_build
from cuda_build import needs_cuda_build
from tonnage.hardware import find_gpu
from tonnage.units import MIB
from tonnage.virtual import process_memory
from tonnage.virtual.host_memory import _AddressRanges, _Files
from virtual_runs import TONNAGE

pytest.importorskip("torch")

SCRIPT = """
import sys, torch
from torch import nn

way, folder = sys.argv[1:]

def model():
    return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))

if way == "save":
    from safetensors.torch import save_file
    state = {name: torch.ones_like(weight) for name, weight in model().state_dict().items()}
    torch.save(state, folder + "/model.pt")
    save_file(state, folder + "/model.safetensors")
if way == "twice":
    net = model()
    net.load_state_dict(torch.load(folder + "/model.pt"))
if way == "mapped":
    with torch.device("meta"):
        net = model()
    net.load_state_dict(torch.load(folder + "/model.pt", mmap=True), assign=True)
    net.half()
if way == "card":
    from safetensors.torch import load_file
    with torch.device("meta"):
        net = model()
    net.load_state_dict(load_file(folder + "/model.safetensors"), assign=True)
    net.cuda()
if way == "pinned":
    batch = torch.ones(40, 1 << 20, dtype=torch.uint8).pin_memory()
if way == "high":
    print(max(int(row.split()[1]) for row in open("/proc/self/status") if row.startswith("VmHWM")))
"""
WEIGHTS = 8 * 4096 * 4096 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("host")
    (path / "script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, path / "script.py", "save", path], check=True)
    return path


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_cuda_build)])
def build(request):
    return request.param


@cache
def predicted(folder, way, build="cpu"):
    tonnage = cuda_build.TONNAGE if build == "cuda" else TONNAGE
    words = ["run", "--gpu", "h200", "--json", "-", str(folder / "script.py"), way, str(folder)]
    done = subprocess.run([tonnage, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def measured(folder, way):
    """The high-water mark of a plain process."""
    text = SCRIPT.replace('if way == "high":', "if True:")
    done = subprocess.run(
        [sys.executable, "-c", text, way, folder], check=True, capture_output=True, text=True, env={"PATH": ""}
    )
    return int(done.stdout.split()[-1]) << 10


def test_a_checkpoint_beside_the_model_counts_twice(folder, build):
    host = predicted(folder, "twice", build)["host"]
    assert host["peak"]["parts"]["checkpoint"] == host["peak"]["parts"]["parameters"] == WEIGHTS
    assert host["peak"]["line"].startswith("script.py:")
    assert host["mapped_peak_bytes"] == 0


def test_pages_of_a_mapped_file_are_kept_apart(folder, build):
    host = predicted(folder, "mapped", build)["host"]
    assert host["mapped_peak_bytes"] == pytest.approx(WEIGHTS, rel=0.01)
    assert host["peak"]["parts"]["parameters"] == WEIGHTS // 2
    assert host["resident_peak_bytes"] > host["needed_bytes"]


def test_what_goes_to_the_card_from_a_file_takes_only_the_files_pages(folder, build):
    """Nothing is read here, but a real card would read it all."""
    figures = predicted(folder, "card", build)
    assert figures["peak_allocated_bytes"] == WEIGHTS
    assert figures["host"]["mapped_peak_bytes"] == pytest.approx(WEIGHTS, rel=0.01)
    assert not {"parameters", "checkpoint", "other"} & set(figures["host"]["peak"]["parts"])


def test_a_process_that_uses_the_card_holds_cudas_context_on_the_host(folder, build):
    parts = {way: predicted(folder, way, build)["host"]["peak"]["parts"] for way in ("card", "twice")}
    assert parts["card"]["cuda"] >= find_gpu("h200").overheads["context"].host_bytes
    assert "cuda" not in parts["twice"]


def test_pinned_memory_is_rounded_up(folder, build):
    assert predicted(folder, "pinned", build)["host"]["peak"]["parts"]["pinned"] == 64 * MIB


@pytest.mark.parametrize("way", ["twice", "mapped"])
def test_the_prediction_is_what_linux_measures(folder, way):
    assert predicted(folder, way)["host"]["resident_peak_bytes"] == pytest.approx(measured(folder, way), rel=0.1)


def test_stretches_count_each_byte_once():
    read = _AddressRanges()
    for start, end in ((0, 10), (20, 30), (5, 8), (8, 22), (40, 50), (30, 40), (45, 60)):
        read.add(start, end)
    assert read.total == 60


def test_a_file_that_was_mapped_since_the_last_look_is_noticed_by_what_is_read(tmp_path):
    """A small file that was mapped before does not hide a large one."""
    files, kept = _Files(), []
    for name, size in (("small", 2 * MIB), ("large", 64 * MIB)):
        (tmp_path / name).write_bytes(bytes(size))
        with (tmp_path / name).open("rb") as file:
            kept.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        sum(kept[-1][::4096])
        if name == "small":
            files.look(process_memory.resident().file_bytes)
    files.grow(process_memory.resident().file_bytes)
    assert files.bytes == (66 * MIB, 66 * MIB)
