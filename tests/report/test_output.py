import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import MIB, climbing_run, training_run
from tonnage.errors import RequestError
from tonnage.hardware import find_gpu
from tonnage.recording import Note, StandIn
from tonnage.recording.replay import replay_on
from tonnage.report.output import publish
from tonnage.report.streams import data_on_stdout

PROMISED = {
    "outcome",
    "gpu",
    "capacity_bytes",
    "fits",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_process_bytes",
    "ledger",
    "phases",
    "largest",
    "stand_ins",
    "not_modelled",
}


def figures(tmp_path: Path, *answers) -> dict:
    target = tmp_path / "answer.json"
    publish(answers, json_target=str(target))
    return json.loads(target.read_text())


def test_the_keys_that_scripts_rely_on_are_there(tmp_path: Path) -> None:
    recording = training_run(overhead_bytes=700 * MIB)
    recording.stand_ins.append(StandIn("loss.item()", "train.py:90", 3, "1.0"))
    recording.notes.append(Note("not_modelled", "my::kernel", 2, "an extension's kernel"))
    said = figures(tmp_path, recording)
    assert set(said) >= PROMISED
    assert (said["outcome"], said["gpu"], said["fits"]) == ("ok", "NVIDIA H200", True)
    assert sum(said["ledger"].values()) == said["peak_allocated_bytes"] == recording.peak_allocated_bytes
    assert said["peak_process_bytes"] == said["peak_reserved_bytes"] + 700 * MIB
    assert set(said["phases"]) >= {"forward", "backward", "optimizer"}
    assert said["largest"][0]["each_bytes"] == 8 * 1024 * 50304 * 4
    assert said["stand_ins"] == [
        {"what": "loss.item()", "line": "train.py:90", "count": 3, "value": "1.0", "decides": ""}
    ]
    assert [note["operator"] for note in said["not_modelled"]] == ["my::kernel"]
    assert said["peak"]["line"] == "train.py:89"
    assert said["oom"] is None
    assert "cards" not in said


def test_a_run_that_dies_says_the_line_the_bytes_asked_for_and_the_bytes_free(tmp_path: Path) -> None:
    said = figures(tmp_path, training_run(batch=64, gpu="t4"))
    assert (said["outcome"], said["fits"]) == ("oom", False)
    assert said["oom"]["line"] == "train.py:87"
    assert said["oom"]["requested_bytes"] > said["oom"]["free_bytes"] >= 0
    assert said["fixes"][0]["rescues"] is True


def test_a_script_that_failed_fits_nobody_knows(tmp_path: Path) -> None:
    assert figures(tmp_path, training_run(outcome="error"))["fits"] is None


def test_several_cards_are_a_list_beside_the_first(tmp_path: Path) -> None:
    ran = training_run(batch=32)
    small = replay_on(ran, find_gpu("t4"))
    said = figures(tmp_path, small, ran)
    assert [card["gpu_key"] for card in said["cards"]] == ["t4", "h200"]
    assert said["outcome"] == "oom" == said["cards"][0]["outcome"]
    assert said["cards"][1]["outcome"] == "ok"


def test_who_asks_for_data_on_stdout_gets_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    publish([training_run()], json_target="-")
    out, err = capsys.readouterr()
    assert json.loads(out)["outcome"] == "ok"
    assert err == ""


def test_who_asks_for_a_page_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    publish([training_run()], page=page)
    assert capsys.readouterr() == (f"wrote {page}\n", "")
    publish([training_run()], page=page, json_target="-")
    out, err = capsys.readouterr()
    assert json.loads(out)["outcome"] == "ok" and err == f"wrote {page}\n"


def test_the_browser_is_given_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser of our own: it writes down what it is asked to show."""
    seen, browser = tmp_path / "seen", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    code = (
        "from pathlib import Path; from tonnage.report.output import page_target, write_page;"
        "write_page(page_target(None, opens=True, force=False), 'the page', opens=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    page = Path(done.stdout.removeprefix("wrote ").strip())
    assert page.read_text() == "the page" and seen.read_text().strip() == page.as_uri()


def test_words_go_to_stdout_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    publish([training_run()])
    out, err = capsys.readouterr()
    assert "NVIDIA H200" in out
    assert err == ""


def test_a_file_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="Cannot write"):
        publish([training_run()], json_target=str(tmp_path / "no" / "answer.json"))


def test_what_a_script_prints_stays_out_of_the_data() -> None:
    code = """
import os, sys
from tonnage.report.streams import data_on_stdout
with data_on_stdout(True):
    print("from python")
    os.system("echo from a child")
print("data")
with data_on_stdout(False):
    print("more")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "data\nmore\n"
    assert done.stderr == "from python\nfrom a child\n"


def test_stdout_comes_back_after_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), data_on_stdout(True):
        raise ValueError
    os.write(1, b"back")
    assert capfd.readouterr().out == "back"


def test_a_run_that_climbs_says_so_to_programs(tmp_path: Path) -> None:
    said = figures(tmp_path, climbing_run(capacity_bytes=1024 * MIB))
    assert (said["outcome"], said["verdict"]) == ("ok", "fits so far, but climbs")
    assert said["climbs"] == {"each_bytes": 64 * MIB, "dies_at_step": 15}
    assert "about step 15" in said["outlook"][0]
    healthy = figures(tmp_path, training_run())
    assert (healthy["verdict"], healthy["climbs"], healthy["outlook"]) == ("fits", None, [])
