import io
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

import tonnage.watch
from nvml_fake import GIB, FakeCard, FakeNvml
from tonnage.commands import watch as command
from tonnage.commands.app import app
from tonnage.errors import RequestError
from tonnage.hardware import nvml as nvml_module
from virtual_runs import run_tonnage


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A machine with one H200 that somebody trains on."""
    fake = FakeNvml(FakeCard(used_bytes=90 * GIB, busy_percent=99, compute={2**22 + 7: 89 * GIB}))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def stop_after(samples: int, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda _: None) -> None:
    """Ctrl-C, after so many samples; `before` each of them something may happen."""
    plain = tonnage.watch.moments

    def until(*arguments: object, **words: object) -> Iterator[object]:
        for number, moment in enumerate(plain(*arguments, sleep=lambda _: None)):
            if number == samples:
                raise KeyboardInterrupt
            yield moment
            before(number)

    monkeypatch.setattr(tonnage.watch, "moments", until)


def test_once_shows_every_gpu_and_stops(machine: FakeNvml) -> None:
    done = CliRunner().invoke(app, ["watch", "--once"])
    assert done.exit_code == 0
    assert "GPU 0  NVIDIA H200" in done.output
    assert "90.00 of 140.00 GiB  64 %" in done.output
    assert "89.00 GiB" in done.output
    assert machine.open == 0


def test_without_a_terminal_a_sample_is_a_line(machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(3, monkeypatch)
    done = CliRunner().invoke(app, ["watch"])
    assert done.exit_code == 0
    assert len(done.output.splitlines()) == 3
    assert "\x1b" not in done.output


def test_on_a_terminal_the_frame_is_drawn_again(machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    stop_after(3, monkeypatch, lambda number: setattr(machine.cards[0], "used_bytes", (100 + number) * GIB))
    command.watch(interval=0.5, once=False, json="", prometheus=None)
    text = terminal.getvalue()
    assert text.count("GPU 0") >= 3
    assert "\x1b[2K" in text
    assert "every 0.5 s" in text
    assert "Ctrl-C stops" in text


def test_json_is_a_line_a_sample(machine: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stop_after(2, monkeypatch)
    done = CliRunner().invoke(app, ["watch", "--json", str(tmp_path / "watch.jsonl")])
    assert done.exit_code == 0
    samples = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [sample["gpus"][0]["used_bytes"] for sample in samples] == [90 * GIB] * 2


def test_data_on_standard_output_is_data_alone(machine: FakeNvml) -> None:
    done = CliRunner().invoke(app, ["watch", "--once", "--json", "-"])
    assert json.loads(done.stdout)["gpus"][0]["total_bytes"] == 140 * GIB
    assert "GPU 0" in done.stderr


def test_a_file_that_cannot_be_written_is_said_in_words(machine: FakeNvml, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["watch", "--once", "--json", str(tmp_path / "no" / "file")])
    assert isinstance(done.exception, RequestError)


def test_prometheus_is_served_while_it_watches(machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    scraped: list[str] = []

    def scrape(number: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{served[0].split()[-1]}/metrics", timeout=10) as answer:
            scraped.append(answer.read().decode())

    monkeypatch.setattr("builtins.print", lambda *words, **_: served.extend(map(str, words)))
    stop_after(1, monkeypatch, scrape)
    done = CliRunner().invoke(app, ["watch", "--prometheus", "0"])
    assert done.exit_code == 0
    families = {family.name: family for family in text_string_to_metric_families(scraped[0])}
    (sample,) = families["tonnage_gpu_memory_used_bytes"].samples
    assert sample.value == 90 * GIB


def test_once_and_serving_exclude_each_other(machine: FakeNvml) -> None:
    done = CliRunner().invoke(app, ["watch", "--once", "--prometheus", "9400"])
    assert isinstance(done.exception, RequestError)


def test_without_a_gpu_it_says_so_and_exits_2() -> None:
    try:
        with nvml_module.open_nvml():
            pytest.skip("there is a GPU here")
    except nvml_module.MissingPart:
        done = run_tonnage("watch", "--once")
    assert done.returncode == 2
    assert "NVIDIA" in done.stderr
    assert "Traceback" not in done.stderr
