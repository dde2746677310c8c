"""The command as a person runs it: in a process of its own, with signals."""

import atexit
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.tiny import make_llama
from tonnage.commands.main import main
from tonnage.commands.serve import _budget, command
from tonnage.errors import BadModel, MissingPart, RequestError, UnknownModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_module("tonnage.serve.server.running")  # so that forks have loaded it
    return make_llama(tmp_path_factory.mktemp("models") / "tiny", context=4096)


class Forked:
    """`tonnage serve` in a fork of this process, which has loaded torch and transformers: seconds faster than a new Python."""

    def __init__(self, words: list[str], before: Callable[[], object] | None = None, **environment: str) -> None:
        """`before`: what the process does first."""
        (out, its_out), (errors, its_errors) = os.pipe(), os.pipe()
        arguments = (words, before, environment, its_out, its_errors)
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=arguments)
        self._process.start()
        for descriptor in (its_out, its_errors):
            os.close(descriptor)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(errors)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it says until it ends."""
        self._process.join(timeout)
        assert self.returncode is not None, "it does not end"
        return self.stdout.read(), self.stderr.read()


def _serve(
    words: list[str], before: Callable[[], object] | None, environment: dict[str, str], out: int, errors: int
) -> None:
    """Run the command as a new process would, without what this one does at its exit."""
    atexit._clear()
    os.dup2(out, 1)
    os.dup2(errors, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(environment)
    if before:
        before()
    sys.argv = ["tonnage", "serve", *words]
    main()


def start_anew(words: list[str]) -> subprocess.Popen[str]:
    """In a Python of its own."""
    code = "import torchvision_names; from tonnage.commands.main import main; main()"
    folders = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-c", code, "serve", *words], env=os.environ | {"PYTHONPATH": folders}, **pipes
    )


@contextmanager
def server(
    words: list[str], start: Callable[..., Any] = Forked, **options: Any
) -> Iterator[tuple[Any, str, list[str]]]:
    process = start([*words, "--port", "0", "--device", "cpu", "--budget", "256 MiB"], **options)
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"on (http://\S+)/v1", line):
                break
        else:
            raise AssertionError(process.stderr.read())
        # It listens once it says so, and whoever asks for its health needs no key.
        assert httpx.get(f"{found[1]}/health", timeout=20).status_code == 200
        yield process, found[1], said
    finally:
        process.kill()
        process.communicate()


def test_it_prints_the_ledger_serves_and_drains(folder: Path) -> None:
    words = [str(folder), "--max-seqs", "4", "--watch", "0.2", "--api-key", "k"]
    with server(words, start=start_anew) as (process, url, said):
        for word in ("weights", "KV blocks", "activations", "left", "blocks ×"):
            assert any(word in line for line in said), word
        key = {"Authorization": "Bearer k"}
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=key, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            health = httpx.get(f"{url}/health")
            assert health.status_code == 503 and health.json() == {"status": "draining"}
            refused = httpx.post(f"{url}/v1/completions", json=body, headers=key)
            assert refused.status_code == 503 and refused.headers["Retry-After"]
            assert [line for line in lines if line][-1] == "data: [DONE]", "what runs is finished"
        rest, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert "running" in rest and "Traceback" not in errors


def test_a_drain_of_no_seconds_gives_up_at_once(folder: Path) -> None:
    with server([str(folder), "--drain", "0"]) as (process, url, _):
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert any("stopping" in line for line in lines)
        process.communicate(timeout=30)
        assert process.returncode == 0


def test_ctrl_c_twice_ends_an_idle_server_in_order(folder: Path) -> None:
    with server([str(folder)]) as (process, _, _):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and "left behind" not in errors


def hang() -> None:
    from tonnage.serve.model_runner.runner import Runner

    Runner.launch = lambda self, step: print("hangs", flush=True) or time.sleep(1e6)  # type: ignore[method-assign]


def test_a_step_that_hangs_does_not_keep_the_process(folder: Path) -> None:
    with server([str(folder)], before=hang) as (process, url, _):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "hello"}, timeout=0.2)
        assert any("hangs" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        # The client is gone, so there is nothing to drain, and soon nobody listens.
        with suppress(httpx.TransportError):
            while httpx.get(f"{url}/health").status_code != 503:
                pass
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1 and "left behind" in errors and "Traceback" not in errors


def test_the_key_may_come_from_the_environment_and_the_name_from_a_flag(folder: Path, tmp_path: Path) -> None:
    figures = tmp_path / "card.json"
    words = [str(folder), "--served-name", "my/model", "--json", str(figures)]
    with server(words, TONNAGE_API_KEY="secret\n") as (_, url, _):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/metrics").status_code == 200
        (model,) = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}).json()["data"]
        assert model["id"] == "my/model" and model["max_model_len"] == 4096
        assert json.loads(figures.read_text())["blocks"] > 1


def test_a_budget_that_is_too_small_exits_1_with_the_numbers(folder: Path) -> None:
    process = Forked([str(folder), "--port", "0", "--device", "cpu", "--budget", "1 MiB"])
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "--budget" in errors and "MiB" in errors and "Traceback" not in errors


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.commands.serve._engine", lambda *_: pytest.fail("it has loaded the model"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RequestError, match=f"Cannot listen on 127.0.0.1 port {port}: Address already in use"):
            command([str(folder), "--port", str(port)])


@pytest.mark.parametrize(
    "flag", ["--max-waiting=0", "--watch=0", "--drain=-1", "--watch=nan", "--api-key=", "--api-key=ü"]
)
def test_flags_that_make_no_sense(folder: Path, flag: str) -> None:
    with pytest.raises(RequestError):
        command([str(folder), flag])


def test_a_key_of_blanks_is_no_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_API_KEY", " \n")
    with pytest.raises(RequestError, match="empty"):
        command([str(folder)])


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel):
        command([str(tmp_path / "nothing")])
    with pytest.raises(BadModel, match=r"config\.json"):
        command([str(tmp_path)])


def test_without_fastapi_the_hint_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "tonnage.serve.server.running", raising=False)
    with pytest.raises(MissingPart, match="fastapi") as caught:
        command([str(folder)])
    assert "tonnage[serve]" in caught.value.hint


def test_budgets_are_shares_or_sizes() -> None:
    assert _budget("0.9") == 0.9 and _budget("1") == 1.0
    assert _budget("60 GiB") == "60 GiB" and _budget("4096") == "4096"
    assert _budget("90%") == 0.9 and _budget(" 50 %") == 0.5


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RequestError, match=f"--device {device} is no") as caught:
        command([str(folder), "--port", "0", "--device", device])
    assert "cpu" in caught.value.hint
