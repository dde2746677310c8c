import json
import pickle
from pathlib import Path

import pytest
from typer.testing import CliRunner

from snapshots import DATA
from support import training_run
from tonnage.commands.app import app
from tonnage.recording import write_recording
from virtual_runs import run_tonnage

CAUSES = {"capacity", "fragmentation", "leak", "outside", "other-process", "pinned-host", "unbounded-cache", "none"}
NANO_GPT = Path(__file__).parents[2] / "benchmarks" / "truth" / "scripts" / "nano_gpt.py"


def explained(file: Path, tmp_path: Path) -> dict:
    target = tmp_path / "why.json"
    done = CliRunner().invoke(app, ["explain", str(file), "--json", str(target)])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    answer = json.loads(target.read_text())
    assert answer["cause"] in CAUSES and answer["sentence"].endswith(".")
    assert all({"saves_bytes", "costs", "change"} <= set(fix) for fix in answer["fixes"])
    return answer


@pytest.mark.parametrize(
    ("name", "cause", "guilty"),
    [
        ("normal", "none", {"nano_gpt.py:59", "nano_gpt.py:102"}),
        ("oom", "capacity", {"mlp_train.py:35"}),
        ("fragmented", "fragmentation", {"fragment.py:17", "fragment.py:11"}),
    ],
)
def test_real_snapshots_have_their_cause_and_guilty_lines(
    name: str, cause: str, guilty: set[str], tmp_path: Path
) -> None:
    answer = explained(DATA / f"{name}.pickle.gz", tmp_path)
    assert answer["cause"] == cause
    assert guilty <= {row["line"] for row in answer["evidence"][0]["lines"]}


def test_the_change_that_helps_a_fragmented_run_comes_first(tmp_path: Path) -> None:
    first = explained(DATA / "fragmented.pickle.gz", tmp_path)["fixes"][0]
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in first["change"]
    assert first["rescues"] and first["saves_bytes"] > 0


def test_a_recording_is_explained_like_a_snapshot(tmp_path: Path) -> None:
    write_recording(tmp_path / "run.tonnage", training_run(gpu="t4", batch=64))
    assert explained(tmp_path / "run.tonnage", tmp_path)["cause"] == "capacity"


def test_the_leak_of_a_whole_script_is_found_with_its_line(tmp_path: Path) -> None:
    kept, shape = tmp_path / "run.tonnage", ["--flash", "--leak", "--layers", "2", "--dim", "256", "--batch", "2"]
    done = run_tonnage("run", "--gpu", "h200", "-o", str(kept), str(NANO_GPT), *shape)
    assert done.returncode == 0, done.stderr
    answer = explained(kept, tmp_path)
    (line,) = [n for n, text in enumerate(NANO_GPT.read_text().splitlines(), 1) if "losses.append" in text]
    assert answer["cause"] == "leak"
    assert f"nano_gpt.py:{line}" in answer["sentence"]
    assert answer["evidence"][0]["lines"][0]["line"] == f"nano_gpt.py:{line}"


def test_a_run_that_dies_says_why(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('import torch\nkept = [torch.empty(2**30, device="cuda") for _ in range(9)]\n')
    done = run_tonnage("run", "--gpu", "t4", str(script))
    assert done.returncode == 1
    assert "The card is too small for it: it asked for 4.00 GiB more at train.py:2" in done.stdout


def test_json_on_standard_output_is_data_alone(tmp_path: Path) -> None:
    write_recording(tmp_path / "run.tonnage", training_run())
    done = run_tonnage("explain", str(tmp_path / "run.tonnage"), "--json", "-")
    assert json.loads(done.stdout)["cause"] == "none"
    assert done.stderr.startswith("tonnage: there is no script at") and done.stderr.count("\n") == 2


def test_what_is_no_recording_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    done = run_tonnage("explain", str(tmp_path / "x"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.startswith("tonnage:")


def test_a_snapshot_without_a_script_names_its_card_once(tmp_path: Path) -> None:
    (tmp_path / "empty.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    done = run_tonnage("explain", str(tmp_path / "empty.pickle"))
    assert done.stdout.splitlines()[1].split(maxsplit=2)[:2] == ["GPU", "unknown"]
    assert done.stdout.count("GPU unknown") == 1


ERROR = (
    'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which "
    "100.00 MiB is free. Including non-PyTorch memory, this process has 23.50 GiB memory in use. Of the allocated memory "
    "14.00 GiB is allocated by PyTorch, and 9.00 GiB is reserved by PyTorch but unallocated.\n"
)


def test_the_text_of_an_error_is_explained_from_a_file_and_from_standard_input(tmp_path: Path) -> None:
    (tmp_path / "error.txt").write_text(ERROR)
    done = run_tonnage("explain", str(tmp_path / "error.txt"))
    assert done.returncode == 0 and "fragmentation, likely" in done.stdout and "train.py:12" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    piped = CliRunner().invoke(app, ["explain", "-", "--json", "-"], input=ERROR)
    answer = json.loads(piped.stdout)
    assert (answer["cause"], answer["certainty"], answer["phase"]) == ("fragmentation", "likely", "backward")
    assert answer["numbers"]["unallocated_bytes"] == 9 * 2**30 and answer["steps"]


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        ([], None, "nothing to explain"),
        (["x.txt"], b"hello", "Nothing in the text is a known message"),
        (["x.txt"], b"", "nothing in the text"),
        (["x.txt"], b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "is a picture"),
        (["x.txt"], bytes(range(256)), "not a readable recording"),
        (["x.txt", "--html", "page.html"], ERROR.encode(), "no page"),
        (["x.txt", "--clipboard"], ERROR.encode(), "Either a file or the clipboard"),
        (["missing.txt"], None, "missing.txt"),
    ],
)
def test_texts_that_cannot_be_explained_get_a_clear_word(
    words: list[str], content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("x.txt").write_bytes(content)
    done = run_tonnage("explain", *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
