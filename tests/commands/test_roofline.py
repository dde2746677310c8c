import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tonnage.commands.app import app
from tonnage.errors import BadProfile, OutputExists, RequestError, UnknownGpu, UnknownModel

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "roofline" / "data"
NCU, STEP = str(DATA / "ncu.csv.gz"), str(DATA / "step.json.gz")
MODEL = ("--model", "llama-3.1-8b", "--gpu", "h200")


def said(*words: str) -> str:
    done = CliRunner().invoke(app, ["roofline", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.mark.parametrize("words", [(NCU,), (STEP,), MODEL, (*MODEL, "--phase", "train", "--batch", "4", "--seq", "8k")])
def test_reports_fit_80_columns(words: tuple[str, ...]) -> None:
    lines = said(*words).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("what to do" in line for line in lines)


def test_ncu_s_kernels_have_their_classes() -> None:
    figures = json.loads(said(NCU, "--json", "-"))
    bounds = {item["name"]: item["bound"] for item in figures["items"]}
    assert bounds["nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT"] == "compute-bound"
    assert bounds["elementwise add"] == bounds["reduce sum"] == bounds["layer_norm"] == "memory-bound"
    assert bounds["elementwise Mul"] == "latency-bound"


def test_rows_can_be_asked_for() -> None:
    assert "more: --rows" in said(STEP)
    assert "more: --rows" not in said(STEP, "--rows", "500")


def test_json_has_what_was_printed(tmp_path: Path) -> None:
    target = tmp_path / "roofline.json"
    said(*MODEL, "--batch", "8", "--json", str(target))
    figures = json.loads(target.read_text())
    assert figures["kind"] == "model" and figures["gpu"] == "NVIDIA H200" and not figures["measured"]
    assert sum(item["seconds"] for item in figures["items"]) == pytest.approx(figures["seconds"])
    assert sum(figures["seconds_by_bound"].values()) == pytest.approx(figures["seconds"])
    assert {item["bound"] for item in figures["items"]} <= set(figures["classes"])


def test_measured_ceilings_are_used(tmp_path: Path) -> None:
    ceilings = tmp_path / "mine.json"
    ceilings.write_text(
        json.dumps({"tonnage_ceilings": 1, "gpu": "h200", "memory_bytes_per_s": 4.3e12, "rates": {"bf16": 8e14}})
    )
    text = said(STEP, "--ceilings", str(ceilings))
    assert "ceilings, measured: 4.30 TB/s · bf16 800 TFLOP/s" in text
    assert "ceilings, stated: 4.80 TB/s" in said(STEP)


def test_another_card_may_be_asked_for() -> None:
    assert "H100" in said(STEP, "--gpu", "h100").splitlines()[1]


def test_the_page_is_written_and_not_replaced(tmp_path: Path) -> None:
    page = tmp_path / "roofline.html"
    assert f"wrote {page}" in said(NCU, "--html", str(page)).replace("\n", "")
    done = CliRunner().invoke(app, ["roofline", NCU, "--html", str(page)])
    assert isinstance(done.exception, OutputExists)
    said(NCU, "--html", str(page), "--force")
    done = CliRunner().invoke(app, ["roofline", NCU, "--html", str(tmp_path / "none" / "page.html")])
    assert isinstance(done.exception, RequestError)


@pytest.mark.parametrize(
    ("words", "error", "problem"),
    [
        ((), RequestError, "nothing was given"),
        ((NCU, *MODEL), RequestError, "both a file and --model"),
        (("--model", "llama-3.1-8b"), RequestError, "does not say on which card"),
        ((*MODEL, "--phase", "dream"), RequestError, "no phase 'dream'"),
        ((*MODEL, "--batch", "0"), RequestError, "--batch 0"),
        ((*MODEL, "--seq", "long"), RequestError, "not a number of tokens"),
        (("--model", "lama-8b-no-such", "--gpu", "h200"), UnknownModel, "lama-8b-no-such"),
        ((NCU, "--gpu", "h300"), UnknownGpu, "h300"),
        ((str(ROOT / "pyproject.toml"),), BadProfile, "neither JSON nor"),
        (("no-such-file.json",), BadProfile, "cannot be read"),
    ],
)
def test_mistakes_get_words(words: tuple[str, ...], error: type[RequestError], problem: str) -> None:
    done = CliRunner().invoke(app, ["roofline", *words])
    assert isinstance(done.exception, error), done.output
    assert problem in str(done.exception) and done.exception.hint


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\nfrom tonnage.commands.app import app\n"
        f"app(['roofline', {NCU!r}], standalone_mode=False)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_probe_says_where_there_is_no_card() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    probe = ROOT / "benchmarks" / "roofline_probe.py"
    done = subprocess.run([sys.executable, str(probe)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "sees no CUDA card" in done.stderr


def test_the_keys_of_the_json_are_documented_and_exist() -> None:
    figures = json.loads(said(STEP, "--json", "-"))
    table = (ROOT / "docs" / "roofline.md").read_text().split("## For programs")[1]
    documented = dict(re.findall(r"^\| (`.+?) \| (.+) \|$", table, re.M))
    keys = {key for cell in documented for key in re.findall(r"`(\w+)`", cell)}
    assert keys <= set(figures) and {"items", "fixes", "seconds_by_bound"} <= keys
    assert set(re.findall(r"`(\w+)`", documented["`items`"])) <= set(figures["items"][0])
    assert set(re.findall(r"`(\w+)`", documented["`timeline`"])) == set(figures["timeline"])
