"""Every verb's report at several widths and in encodings that lack its signs."""

import io
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvml_fake import GIB, FakeCard, FakeNvml
from support import MIB, Run, training_run
from tonnage.allocator import OutOfMemory
from tonnage.commands import plan_train
from tonnage.commands.main import main
from tonnage.ledger import Category
from tonnage.recording import Note, Recording, StandIn, write_recording

TONNAGE = str(Path(sys.executable).parent / "tonnage")
WIDTHS = (60, 80, 140)
LORA = "base_model.model.model.language_model.layers.11.self_attn.q_proj.lora_A.default"
NOTE = "run eagerly: a compiled graph allocates other, often fewer, buffers than these"
# What a report says whole or not at all, each with the verb that says it.
HINTS = {
    "show": ["--verbose", NOTE, "PYTORCH_ALLOC_CONF=expandable_segments:True", "torch.compile"],
    "dies": ["--verbose", NOTE, "short, in mul of", "gets past that line"],
    "explain": ["what to do", "gets past that line"],
    "diff": ["by module", "--rows", "more than 1MiB"],
    "plan train": ["chunked loss", "offload optimizer:nvme", "--explain", "--export DIR"],
    "plan train, too large": ["does not fit", "what would fit", "--gpus", "its largest terms"],
    "plan serve": ["fits", "--max-model-len", "decoded tokens a second, at most"],
    "gpu": ["tonnage gpu --hosts", "tonnage gpu h200 rtx-4090"],
    "gpu h200": ["order of magnitude"],
    "gpu --hosts": ["4xp5.48xlarge"],
    "roofline": ["batch them", "use a CUDA graph", "norms and residuals"],
    "replay": ["PYTORCH_ALLOC_CONF=expandable_segments:True"],
    "help": ["and report what it would allocate.", "how near its bound, and what to do.", "all ranks side by side."],
}


def long_run(name: str, folder: Path) -> Path:
    """A training with long names, that dies where it is to."""
    dies = name == "dies"
    recording = _dying() if dies else training_run(batch=32, layers=12)
    recording.notes.append(Note("not_modelled", "torch.compile", 3, NOTE))
    recording.stand_ins += [StandIn("tensor of 262,144 float", "train_with_lora.py:90", 3, "1.0")] * 2
    recording.header.script = str(folder / "a" / "long" / "path" / "to" / "train_with_lora.py")
    path = folder / f"{name}-of-a-training-with-a-long-name.tonnage"
    write_recording(path, recording)
    return path


def _dying() -> Recording:
    run = Run("t4")
    run.step(1)
    run.phase("forward")
    words = {"module": LORA, "operator": "aten::mul", "line": "train_with_lora.py:39", "dtype": "bfloat16"}
    with pytest.raises(OutOfMemory) as caught:
        for index in range(99):
            line = f"transformers/models/llama/modeling_llama.py:{254 + index % 3}"
            size = 512 * MIB
            run.alloc(size, Category.ACTIVATIONS, shape=(64, 2048, 2048), stack=(line, words["line"]), **words)
    return run.dies(caught.value, line=words["line"], module=LORA, operator="aten::mul")


def calls(folder: Path) -> dict[str, list[str]]:
    fits, dies = (str(long_run(name, folder)) for name in ("fits", "dies"))
    trace = Path(__file__).parents[1] / "allocator" / "data" / "default-vision_train-21.json.gz"
    return {
        "show": ["show", fits],
        "show --verbose": ["show", fits, "--verbose"],
        "dies": ["show", dies],
        "explain": ["explain", dies, "--no-run"],
        "explain --verbose": ["explain", fits, "--no-run", "--verbose"],
        "diff": ["diff", dies, fits, "--rows", "2", "--fail-above", "1MiB"],
        "plan train": ["plan", "train", "llama-3.1-70b", "--gpus", "2xh100", "--seq", "8k"],
        "plan train --explain": ["plan", "train", "llama-3.1-8b", "--gpus", "8xh100", "--explain"],
        "plan train, too large": ["plan", "train", "llama-3.1-405b", "--gpus", "8xa100-40"],
        "plan serve": ["plan", "serve", "llama-3.1-70b", "--gpus", "4xh100", "--users", "16", "--explain"],
        "plan serve, too large": ["plan", "serve", "llama-3.1-405b", "--gpus", "4xh100", "--users", "16"],
        "gpu": ["gpu"],
        "gpu h200": ["gpu", "h200", "rtx-4090", "t4"],
        "gpu --hosts": ["gpu", "--hosts"],
        "roofline": ["roofline", "--model", "llama-3.1-8b", "--gpu", "h200"],
        "replay": ["replay", str(trace)],
        "help": ["--help"],
    }


NAMES = list(
    dict.fromkeys([*HINTS, "show --verbose", "explain --verbose", "plan train --explain", "plan serve, too large"])
)


@pytest.fixture(scope="module", autouse=True)
def searched_once() -> Iterator[None]:
    """What is planned does not depend on how it is shown: every plan of a training is searched for once."""
    plain, known = plan_train._search, {}

    def search(options: Namespace) -> Any:
        asked = str(options)
        if asked not in known:
            known[asked] = plain(options)
        return known[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_train, "_search", search)
        yield


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return calls(tmp_path_factory.mktemp("reports"))


def said(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["tonnage", *words])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_wider_than_asked_and_no_hint_is_cut(
    name: str,
    width: int,
    words: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = said(words[name], monkeypatch, capsys)
    assert [line for line in text.splitlines() if len(line) > width or line != line.rstrip()] == []
    flat = " ".join(text.split())
    assert [hint for hint in HINTS.get(name, []) if hint not in flat] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_watched_is_as_wide_as_asked(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    fake = FakeNvml(FakeCard(used_bytes=139 * GIB, busy_percent=99, compute={2**22 + 7: 89 * GIB}))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    text = said(["watch", "--once"], monkeypatch, capsys)
    assert [line for line in text.splitlines() if len(line) > width] == []
    assert "holds most" in " ".join(text.split())


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize(
    "name", ["dies", "explain", "diff", "plan train", "plan serve", "gpu h200", "roofline", "replay"]
)
def test_an_encoding_that_lacks_signs_gets_look_alikes(
    name: str, encoding: str, words: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["tonnage", *words[name]])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main()
    text = stream.buffer.getvalue().decode(encoding)
    assert ended.value.code in (None, 0, 1) and text
    assert "?" not in text and "\\u" not in text
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_a_reader_that_leaves_early_is_no_error(words: dict[str, list[str]]) -> None:
    for name in ("show", "plan train", "help"):
        call = " ".join([TONNAGE, *words[name]])
        script = f"set -o pipefail; {call} | head -1"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), name


def test_the_c_locale_gets_look_alikes_too() -> None:
    """Python then lets bytes through that are no letters, but no letter that ASCII lacks."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "80"}
    environment.pop("PYTHONIOENCODING", None)
    words = [str(TONNAGE), "roofline", "--model", "llama-3.1-8b", "--gpu", "h200"]
    done = subprocess.run(words, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"###" in done.stdout and done.stdout.isascii()
