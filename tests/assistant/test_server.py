"""The server as an assistant sees it: the SDK's client, standard input and output, and the real process."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import anyio
import pytest

from assistant_client import BEFORE, NEWEST, Person, Talk, is_alive, talk, until
from support import training_run
from tonnage.recording import write_recording

FITS = "import torch\nx = torch.zeros(2**28, device='cuda')\n"
DIES = "import torch\nheld = [torch.zeros(2**30, device='cuda') for _ in range(40)]\n"
WAITS = f"""{FITS}
import os, pathlib, time
pathlib.Path('pid').write_text(str(os.getpid()))
while True:
    torch.ones(9, device='cuda')
    time.sleep(0.01)
"""
MOST_CHARACTERS = 2500  # six hundred tokens or so


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in {"fits": FITS, "dies": DIES, "waits": WAITS, "fails": "raise ValueError('no data')\n"}.items():
        (folder / f"{name}.py").write_text(text)
    write_recording(folder / "a.tonnage", training_run(batch=4))
    write_recording(folder / "b.tonnage", training_run(batch=8))
    (folder / "outside.tonnage").symlink_to(tmp_path_factory.mktemp("elsewhere") / "secret.tonnage")
    return folder


@pytest.fixture(scope="module")
def server(project: Path) -> Iterator[Talk]:
    with talk(project, "--allow-run") as conversation:
        yield conversation


@pytest.fixture(scope="module", params=[NEWEST, BEFORE])
def unable(request: pytest.FixtureRequest, project: Path) -> Iterator[Talk]:
    """A client that cannot ask a person, at a server that has to."""
    with talk(project, mode=request.param) as conversation:
        yield conversation


def pages(result) -> list[Path]:
    return [Path(unquote(urlparse(link.uri).path)) for link in result.content if link.type == "resource_link"]


def test_tools_say_what_they_do(unable: Talk) -> None:
    listed = unable.portal.call(unable.client.list_tools)
    tools = {tool.name: tool for tool in listed.tools}
    assert {"plan", "show", "explain", "diff", "gpus", "help", "run"} <= set(tools)
    for name, tool in tools.items():
        runs = name in ("run", "certify")
        assert tool.annotations.read_only_hint is not runs and tool.annotations.destructive_hint is runs, name
        assert tool.annotations.open_world_hint is (runs or name == "plan"), name
        assert tool.description and tool.input_schema["additionalProperties"] is False
        assert all("description" in argument for argument in tool.input_schema["properties"].values()), name
        assert "consent" not in tool.input_schema["properties"]
    assert len(listed.model_dump_json()) < 9000


@pytest.mark.parametrize(
    ("tool", "arguments", "words", "figures"),
    [
        ("plan", {"what": "train", "model": "llama-3.1-8b", "gpus": "8xh100"}, "llama-3.1-8b fits on 8 × h100", "best"),
        ("plan", {"what": "train", "model": "gpt2", "gpus": "t4", "flags": ["--lora", "8"]}, "fits on 1 × t4", "best"),
        (
            "plan",
            {"what": "serve", "model": "llama-3.1-8b", "gpus": "h100", "flags": "--users 4"},
            "users",
            "most_users",
        ),
        ("plan", {"what": "rl", "model": "qwen2.5-7b", "gpus": "8xh100"}, "qwen2.5-7b fits", "best"),
        ("plan", {"what": "serve", "model": "flux-dev", "gpus": "rtx-4090"}, "images/s", "best"),
        ("plan", {"what": "train", "model": "llama-3.1-8b"}, "kinds of cards hold it", "cards"),
        ("plan", {"what": "train", "model": "llama-3.1-405b", "gpus": "t4"}, "does not fit", "best"),
        ("show", {"file": "a.tonnage"}, "at the peak", "ledger"),
        ("explain", {"file": "a.tonnage"}, "", "cause"),
        ("diff", {"before": "a.tonnage", "after": "b.tonnage", "fail_above": "1%"}, "grew by", "peaks"),
        ("gpus", {"names": "h100, l4"}, "2 cards: h100, l4", "gpus"),
        ("gpus", {}, "cards are known", "memory_gib"),
    ],
)
def test_answers_are_small_and_link_a_page(server: Talk, tool: str, arguments: dict, words: str, figures: str) -> None:
    result = server(tool, **arguments)
    line, text = result.content[0].text, result.content[1].text
    assert not result.is_error and words in line and "\n" not in line, line
    assert figures in result.structured_content and json.loads(text) == result.structured_content
    assert len(line) < 500 and len(text) < MOST_CHARACTERS, len(text)
    has_page = tool != "gpus" and (tool != "plan" or "gpus" in arguments) and arguments.get("model") != "flux-dev"
    assert [page.suffix for page in pages(result)] == [".html"] * has_page
    assert all(page.read_text().startswith("<!doctype html>") for page in pages(result))


def test_what_a_script_needs_and_what_its_recording_tells(server: Talk) -> None:
    dies = server("run", gpu="rtx-3060", script="dies.py")
    assert not dies.is_error and "dies.py runs out of memory" in dies.content[0].text
    assert dies.structured_content["oom"]["line"] == "dies.py:2"
    page, recording = pages(dies)
    assert (page.suffix, recording.suffix) == (".html", ".tonnage") and page.is_file()

    assert server("explain", file=recording.name).structured_content["outcome"] == "oom"
    fits = server("run", gpu="rtx-3060", script="fits.py")
    assert "fits.py fits on NVIDIA GeForce RTX 3060: 1." in fits.content[0].text
    grew = server("diff", before=pages(fits)[1].name, after=str(recording))
    assert "grew by" in grew.content[0].text and "dies.py:2" in grew.content[0].text

    listed = {resource.uri: resource for resource in server.portal.call(server.client.list_resources).resources}
    assert {page.as_uri(), recording.as_uri()} <= set(listed)
    read = server.portal.call(server.client.read_resource, page.as_uri()).contents[0]
    assert read.mime_type == "text/html" and "dies.py" in read.text


def test_a_script_that_fails_is_an_error_without_a_traceback(server: Talk) -> None:
    words = server.words("run", gpu="h200", script="fails.py")
    assert words == "fails.py failed for reasons of its own: ValueError: no data"


def test_a_run_that_takes_too_long_says_what_it_saw(server: Talk) -> None:
    server.progress.clear()
    result = server("run", gpu="h200", script="waits.py", timeout_s=20)
    assert not result.is_error, result.content[0].text
    assert result.content[0].text.startswith("Stopped after 20 s")
    assert result.structured_content["outcome"] == "stopped"
    assert result.structured_content["peak_allocated_gib"] == 1.0
    seconds = [progress for progress, _ in server.progress]
    assert seconds == sorted(seconds) and any("GiB" in message for _, message in server.progress)


@pytest.mark.parametrize("mode", [NEWEST, BEFORE])
def test_a_person_is_asked_before_a_script_is_run(project: Path, mode: str) -> None:
    person = Person("accept", run=True)
    with talk(project, person=person, mode=mode) as conversation:
        result = conversation("run", gpu="h200", script="fits.py", arguments="--lr 1e-3")
        assert not result.is_error and "fits on" in result.content[0].text
        (question,) = person.asked
        assert "tonnage run --gpu=h200 fits.py --lr 1e-3" in question and str(project) in question
        for action, content in (("decline", {}), ("accept", {"run": False}), ("cancel", {})):
            person.will(action, **content)
            words = conversation.words("run", gpu="h200", script="fits.py")
            assert "did not agree" in words and len(person.asked) == 1
            conversation("gpus")
            assert len(person.asked) == 1  # what reads alone asks nobody


def test_a_client_that_cannot_ask_cannot_run(unable: Talk) -> None:
    assert "--allow-run" in unable.words("run", gpu="h200", script="fits.py")


@pytest.mark.parametrize("mode", [NEWEST, BEFORE])
def test_a_run_that_is_cancelled_is_ended(project: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = project / "pid"
    monkeypatch.setenv("TONNAGE_WRITE_THROUGH", str(pid_file))
    pid_file.unlink(missing_ok=True)
    with talk(project, "--allow-run", mode=mode) as conversation:
        call = conversation.client.call_tool
        waiting = conversation.portal.start_task_soon(call, "run", {"gpu": "h200", "script": "waits.py"})
        pid = int(until(lambda: pid_file.is_file() and pid_file.read_text()))
        assert is_alive(pid)
        waiting.cancel()
        assert until(lambda: not is_alive(pid), 10)
        assert not conversation("gpus").is_error


def test_a_server_that_is_terminated_ends_what_it_runs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = project / "pid"
    monkeypatch.setenv("TONNAGE_WRITE_THROUGH", str(pid_file))
    pid_file.unlink(missing_ok=True)
    call = [sys.executable, "-m", "tonnage", "mcp", "--folder", project, "--allow-run"]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        for message in _handshake("run", {"gpu": "h200", "script": "waits.py"}):
            server.stdin.write(json.dumps(message) + "\n")
        server.stdin.flush()
        pid = int(until(lambda: pid_file.is_file() and pid_file.read_text()))
        assert is_alive(pid)
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 128 + signal.SIGTERM
        assert until(lambda: not is_alive(pid), 10)


def _handshake(tool: str, arguments: dict) -> list[dict]:
    who = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "by hand", "version": "1"}}
    return [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": who},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": tool, "arguments": arguments}},
    ]


def test_standard_output_is_the_protocol_alone(project: Path) -> None:
    (project / "loud.py").write_text("import os\nprint('loud')\nos.system('echo louder')\n" + FITS)
    call = [sys.executable, "-m", "tonnage", "mcp", "--folder", project, "--allow-run"]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        for message in _handshake("run", {"gpu": "h200", "script": "loud.py"}):
            server.stdin.write(json.dumps(message) + "\n")
        server.stdin.write("this is no message\n")
        server.stdin.flush()
        answers = {}
        while 2 not in answers:
            message = json.loads(server.stdout.readline())
            answers[message.get("id")] = message
        server.stdin.close()
        rest = server.stdout.read()
    assert not answers[2]["result"].get("isError") and "loud" not in rest


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("plan", {}, "what: Field required; model: Field required"),
        ("plan", {"what": "cook", "model": "gpt2"}, "'train', 'serve' or 'rl'"),
        ("plan", {"what": "train", "model": 7}, "model: "),
        ("plan", {"what": "train", "model": ""}, "is no model"),
        ("plan", {"what": "train", "model": "--json"}, "is no model"),
        ("plan", {"what": "train", "model": "gpt2", "gpus": "h100", "flags": "--export out"}, "writes files"),
        ("plan", {"what": "train", "model": "gpt2", "gpus": "h100", "flags": ["--json=x"]}, "writes files"),
        ("plan", {"what": "train", "model": "gpt2", "gpus": "h100", "flags": "--lengths /etc/passwd"}, "not below"),
        ("plan", {"what": "train", "model": "gpt2", "flags": "'open"}, "Close its quotes"),
        ("plan", {"what": "train", "model": "/etc/passwd", "gpus": "h100"}, "not below"),
        ("plan", {"what": "train", "model": "../up/config.json", "gpus": "h100"}, "not below"),
        ("plan", {"what": "train", "model": "~/config.json", "gpus": "h100"}, "not below"),
        ("plan", {"what": "train", "model": "gpt2", "gpus": "/etc/mine.toml"}, "not below"),
        ("plan", {"what": "train", "model": "gpt2", "gpu": "h100"}, "Did you mean gpus?"),
        ("plan", {"what": "train", "model": "no-such-model", "gpus": "h100"}, "no-such-model"),
        ("plan", {"what": "train", "model": "gpt2", "gpus": "h1000"}, "h1000"),
        ("plan", {"what": "train", "model": "gpt2", "gpus": "h100", "flags": "--sequence 3"}, "--sequence"),
        ("plan", {"what": "serve", "model": "gpt2", "gpus": "h100", "flags": "--users -1"}, "users"),
        ("show", {"file": "/etc/passwd"}, "not below"),
        ("show", {"file": "../a.tonnage"}, "not below"),
        ("show", {"file": "outside.tonnage"}, "not below"),
        ("show", {"file": "a\0b"}, "not below"),
        ("show", {"file": "x" * 5000}, "not below"),
        ("show", {"file": ""}, "No file was named"),
        ("show", {"file": "none.tonnage"}, "There is no recording"),
        ("show", {"file": "fits.py"}, "not a"),
        ("show", {"file": "a.tonnage", "rank": -1}, "rank: "),
        ("explain", {}, "a file or a text"),
        ("explain", {"file": "a.tonnage", "text": "out of memory"}, "a file or a text"),
        ("diff", {"before": "a.tonnage", "after": "/dev/zero"}, "not below"),
        ("diff", {"before": "a.tonnage", "after": "b.tonnage", "fail_above": "lots"}, "5%"),
        ("gpus", {"names": "h1000"}, "h1000"),
        ("help", {"command": "rm"}, "command: "),
        ("run", {"gpu": "h200", "script": "/bin/ls"}, "not below"),
        ("run", {"gpu": "h200", "script": "torchrun", "arguments": ["/tmp/elsewhere.py"]}, "not below"),
        ("run", {"gpu": "h200", "script": "python", "arguments": ["-m", "pip"]}, "python"),
        ("run", {"gpu": "h200", "script": "none.py"}, "none.py"),
        ("run", {"gpu": "--help", "script": "fits.py"}, "--help"),
        ("run", {"gpu": "h200", "script": "fits.py", "timeout_s": 0}, "timeout_s"),
        ("dance", {}, "There is no tool 'dance'"),
    ],
)
def test_what_is_wrong_is_said_in_words(server: Talk, tool: str, arguments: dict, words: str) -> None:
    said = server.words(tool, **arguments)
    assert words in said and len(said) < 2000
    assert "Traceback" not in said and "pydantic" not in said and "Error executing" not in said


def test_a_pasted_text_reaches_the_command(server: Talk, project: Path) -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; 12.10 GiB already allocated)"
    )
    (project / "train.log").write_text(text)
    pasted, file = server("explain", text=text), server("explain", file="train.log")
    assert pasted.is_error == file.is_error and "Traceback" not in pasted.content[0].text
    assert pasted.structured_content == file.structured_content and not pages(pasted)


def test_the_flags_of_a_command_can_be_read(server: Talk) -> None:
    assert "--micro-batch" in server("help", command="plan train").content[0].text
    assert "--vae" in server("help", command="plan train of images").content[0].text


def test_it_serves_http_to_this_machine(project: Path) -> None:
    from mcp import Client

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    call = [sys.executable, "-m", "tonnage", "mcp", "--folder", project, "--port", str(port)]
    server = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    async def ask() -> str:
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            return (await client.call_tool("gpus", {"names": "h100"})).content[0].text

    def accepts() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        assert until(accepts), "no one listens"
        assert anyio.run(ask) == "1 card: h100"
    finally:
        server.terminate()
        server.communicate(timeout=10)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npx") is None, reason="no npx here: the protocol's inspector is a package of npm")
def test_the_inspector_of_the_protocol_is_content(project: Path) -> None:
    """It checks every answer against the protocol's schema."""

    def inspect(*words: str) -> dict:
        call = ["npx", "--yes", "@modelcontextprotocol/inspector", "--cli"]
        if paths := os.environ.get("PYTHONPATH"):
            call += ["-e", f"PYTHONPATH={paths}"]
        server = [sys.executable, "--", "-m", "tonnage", "mcp", "--folder", str(project)]
        done = subprocess.run([*call, *server, *words], capture_output=True, text=True, timeout=300, check=False)
        if "npm error" in done.stderr:
            pytest.skip(f"npm does not give the inspector: {done.stderr.splitlines()[0]}")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert "plan" in [tool["name"] for tool in inspect("--method", "tools/list")["tools"]]
    shown = inspect("--method", "tools/call", "--tool-name", "show", "--tool-arg", "file=a.tonnage")
    assert shown["structuredContent"]["ledger"] and shown["content"][2]["type"] == "resource_link"
    refused = inspect("--method", "tools/call", "--tool-name", "run", "--tool-arg", "gpu=h200", "script=fits.py")
    assert refused["isError"]
