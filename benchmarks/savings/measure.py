"""Promised savings against applied ones: each change that the advice offers is made to the script, and both are run.

    python benchmarks/savings/measure.py [NAME ...] [--half tuned|judged] [--folder FOLDER] [-o RESULTS]

Each script under `scripts/` takes `--apply CHANGE`, which is what a person would edit. The script as it is is recorded on a
virtual GPU, its advice is read from the recording, and every change that it has a switch for is applied and run on the same
card. A promise is a difference of two peaks, and so is what is held against it. The scripts of `JUDGED` were written before the
promises were mended and looked at once, at the end (`FIRST_LOOK`); what they showed was mended after that.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "savings.json"
TUNED = (
    "gpt_plain", "gpt2_trainer", "vit_timm", "resnet_sgd", "autoencoder_lightning", "llama_lora", "encoder_eager",
    "gpt2_evaluation", "mlp_wide", "segment_kept",
)  # fmt: skip
JUDGED = (
    "llama_accelerate", "t5_trainer", "unet_plain", "convnext_timm", "lstm_words", "qwen_sft", "unet_diffusers", "gan_two",
)  # fmt: skip
# What the advice calls a change, and the switch of the scripts that makes it.
SWITCHES = {
    r"half the batch|a smaller batch": "batch",
    r"half the batch of evaluation": "eval-batch",
    r"recompute \d+ blocks": "checkpoint",
    r"chunked loss": "chunked",
    r"autocast to bfloat16": "autocast",
    r"fused optimizer": "fused",
    r"8-bit optimizer states": "eight-bit",
    r"free gradients between steps": "free-gradients",
    r"fused attention": "attention",
    r"data on the host": "host-data",
    r"predictions on the host": "predictions",
    r"expandable segments": "expandable",
}
WITHIN = 0.1
# What the judged scripts said before anything that they showed was mended.
FIRST_LOOK = {"scripts": 8, "applied": 39, "within_10_percent": 32}


def tonnage(*words: str, **environment: str) -> None:
    command = [sys.executable, "-c", "from tonnage.commands.main import main; main()", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=600)
    if done.returncode not in (0, 1):
        raise SystemExit(f"tonnage {' '.join(words)} failed:\n{done.stderr[-2000:]}")


def run(script: Path, change: str, folder: Path, gpu: str) -> dict[str, int]:
    """The peaks of a script with a change, run once and kept."""
    kept = folder / f"{script.stem}-{change or 'base'}.json"
    if not kept.exists():
        words = ["--apply", change] if change not in ("", "expandable") else []
        setting = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if change == "expandable" else {}
        recording = ["-o", str(kept.with_suffix(".tonnage")), "--force"] if not change else []
        tonnage("run", "--gpu", gpu, "--json", str(kept), *recording, str(script), *words, **setting)
    figures = json.loads(kept.read_text())
    if figures["outcome"] != "ok":
        raise SystemExit(f"{script.name} with {change or 'no change'} ended with: {figures['outcome']}")
    return {key: figures[key] for key in ("peak_allocated_bytes", "peak_reserved_bytes")}


def promises(script: Path, folder: Path) -> list[dict]:
    """The advice that the recording of the script as it is gives."""
    answer = folder / f"{script.stem}-advice.json"
    recording = folder / f"{script.stem}-base.tonnage"
    tonnage("explain", "--no-run", "--json", str(answer), str(recording))
    return json.loads(answer.read_text())["fixes"]


def compare(name: str, folder: Path, gpu: str, only: frozenset[str] = frozenset()) -> list[dict]:
    """Each promise of a script beside what the change saved; with `only`, of these switches."""
    script = HERE / "scripts" / f"{name}.py"
    before = run(script, "", folder, gpu)
    rows = []
    for fix in promises(script, folder):
        switch = next((key for words, key in SWITCHES.items() if re.fullmatch(words, fix["name"])), None)
        has_switch = switch == "expandable" or f'"{switch}"' in switches_of(script)
        row = {"script": name, "half": "tuned" if name in TUNED else "judged", "change": fix["name"], "how": fix["how"]}
        row |= {"promised_bytes": fix["saves_bytes"], "saved_bytes": None}
        if switch and has_switch and (not only or switch in only):
            key = "peak_reserved_bytes" if switch == "expandable" else "peak_allocated_bytes"
            after = run(script, switch, folder, gpu)
            row["saved_bytes"] = before[key] - after[key]
            row["peak_bytes"] = before[key]
        rows.append(row)
    return rows


def switches_of(script: Path) -> str:
    """Its text; where it uses one of the helpers, with theirs."""
    text, helpers = script.read_text(), (HERE / "scripts" / "switches.py").read_text()
    parts = re.split(r"(?=^def )", helpers, flags=re.MULTILINE)
    return text + "".join(part for part in parts if (name := re.match(r"def (\w+)", part)) and f"{name[1]}(" in text)


def error_of(row: dict) -> float | None:
    """How far the promise was off, as a share of what was saved."""
    if row["saved_bytes"] is None:
        return None
    return (row["promised_bytes"] - row["saved_bytes"]) / max(abs(row["saved_bytes"]), 1)


def summary(rows: list[dict]) -> dict:
    errors = [error for row in rows if (error := error_of(row)) is not None]
    close = sum(abs(error) <= WITHIN for error in errors)
    return {"scripts": len({row["script"] for row in rows}), "applied": len(errors), "within_10_percent": close}


def show(rows: list[dict]) -> None:
    for row in rows:
        error = error_of(row)
        saved = "not applied" if error is None else f"{row['saved_bytes'] / 2**20:9.1f}  {100 * error:+7.1f} %"
        flag = " " if error is None or abs(error) <= WITHIN else "!"
        print(f"{flag} {row['script']:<22}{row['change']:<30}{row['promised_bytes'] / 2**20:9.1f} MiB  {saved}")
        print(f"{'':26}{row['how']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--half", choices=["tuned", "judged"])
    parser.add_argument("--gpu", default="a100-40")
    parser.add_argument("--folder", type=Path, default=Path("savings"), help="where runs are kept")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True, parents=True)
    names = args.names or {"tuned": TUNED, "judged": JUDGED, None: TUNED + JUDGED}[args.half]
    rows = []
    for name in names:
        found = compare(name, args.folder, args.gpu)
        show(found)
        rows += found
    halves = {half: summary([row for row in rows if row["half"] == half]) for half in ("tuned", "judged")}
    print(json.dumps(halves, indent=1))
    if args.output:
        answer = {"gpu": args.gpu, "summary": halves, "judged_at_first_look": FIRST_LOOK, "rows": rows}
        args.output.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
