"""The GitHub Action, by its steps: action.yml is read, and its commands run as a runner runs them.

There is no GitHub: a real git repository, the files that a runner gives, and a server that answers as its API does.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ACTION = Path(__file__).parents[2] / "action.yml"
# One line asks for 1 GiB, as often as it is told; what the environment holds is printed for the test of the token.
TRAIN = """import os, sys
import torch
print(sorted(name for name in os.environ if "TOKEN" in name or name in ("GITHUB_OUTPUT", "GITHUB_ENV")))
held = [torch.zeros(2**28, device="cuda") for _ in range(int(sys.argv[1]) * {times})]
"""


class Api(ThreadingHTTPServer):
    """Comments of one pull request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.comments: list[dict[str, Any]] = [{"id": n, "body": None if n % 2 else "of a person"} for n in range(120)]
        self.allowed = True
        self.tokens: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        assert self.path.startswith("/repos/someone/project/issues/7/comments?per_page=100&page=")
        page = int(self.path.rpartition("=")[2])
        self.answer(200, self.server.comments[100 * (page - 1) : 100 * page])

    def do_POST(self) -> None:
        assert self.path == "/repos/someone/project/issues/7/comments"
        made = {"id": 1000 + len(self.server.comments), "body": self.sent()["body"]}
        if self.server.allowed:
            self.server.comments.append(made)
        self.answer(201 if self.server.allowed else 403, made)

    def do_PATCH(self) -> None:
        number = int(self.path.removeprefix("/repos/someone/project/issues/comments/"))
        mine = next(comment for comment in self.server.comments if comment["id"] == number)
        mine["body"] = self.sent()["body"]
        self.answer(200, mine)

    def sent(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, status: int, content: Any) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Runner:
    """Runs the steps of action.yml in a checkout."""

    def __init__(self, folder: Path, api: Api) -> None:
        self.checkout, self.temp = folder / "checkout", folder / "temp"
        self.checkout.mkdir()
        self.temp.mkdir()
        self.api = api
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.email", "someone@example.com")
        self.git("config", "user.name", "someone")

    def git(self, *words: str) -> str:
        done = subprocess.run(["git", *words], cwd=self.checkout, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, **files: str) -> str:
        for name, text in files.items():
            (self.checkout / f"{name}.py").write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "a change")
        return self.git("rev-parse", "HEAD")

    def run(self, base: str, *, number: int | None = 7, token: str = "secret-token", **inputs: str) -> "Run":
        """All steps in their order, up to one that fails."""
        given = {"inputs.script": "train.py", "inputs.gpu": "h200", "inputs.base-ref": base, "inputs.token": token}
        given |= {f"inputs.{name.replace('_', '-')}": value for name, value in inputs.items()}
        action = yaml.safe_load(ACTION.read_text())
        contexts = {f"inputs.{name}": str(about.get("default", "")) for name, about in action["inputs"].items()}
        contexts |= given | {"github.action_path": str(ACTION.parent)}
        (self.temp / "event.json").write_text(json.dumps({"pull_request": {"number": number}} if number else {}))
        files = {name: self.temp / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "GITHUB_ENV")}
        for file in files.values():
            file.write_text("")
        environment = {**os.environ, **{name: str(file) for name, file in files.items()}, "RUNNER_TEMP": str(self.temp)}
        environment |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GITHUB_REPOSITORY": "someone/project",
        }
        environment |= {"GITHUB_EVENT_PATH": str(self.temp / "event.json")}
        environment |= {"GITHUB_API_URL": f"http://127.0.0.1:{self.api.server_address[1]}"}
        done = Run(files["GITHUB_STEP_SUMMARY"], files["GITHUB_OUTPUT"])
        for step in action["runs"]["steps"]:
            assert step["shell"] == "bash" and "${{" not in step["run"]
            own = {
                name: re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda m: contexts[m[1]], v) for name, v in step["env"].items()
            }
            call = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            step_done = subprocess.run(call, cwd=self.checkout, env=environment | own, capture_output=True, text=True)
            done.output += step_done.stdout + step_done.stderr
            done.status = step_done.returncode
            if done.status:
                break
        return done


class Run:
    """What a run of the action left."""

    def __init__(self, summary: Path, outputs: Path) -> None:
        self.status, self.output, self._summary, self._outputs = 0, "", summary, outputs

    @property
    def summary(self) -> str:
        return self._summary.read_text()

    @property
    def outputs(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._outputs.read_text().splitlines())


@pytest.fixture
def runner(tmp_path: Path, api: Api) -> Runner:
    return Runner(tmp_path, api)


def test_the_difference_is_commented_once_and_changed_by_later_pushes(runner: Runner, api: Api) -> None:
    base = runner.commit(train=TRAIN.format(times=1))
    runner.commit(train=TRAIN.format(times=2))
    done = runner.run(base, arguments="2", threshold="5%")
    assert done.status == 0, done.output
    assert done.outputs["failed"] == "true" and Path(done.outputs["report"]).read_text() == done.summary
    assert "| `allocated` | 2.00 GiB | 4.00 GiB | +2.00 GiB (+100.0 %) |" in done.summary, done.summary
    assert (
        "### GPU memory of `train.py" in done.summary
        and "more than 5%" in done.summary
        and "`train.py:4`" in done.summary
    )
    assert len(api.comments) == 121 and api.comments[-1]["body"].endswith(done.summary)
    assert api.tokens == {"Bearer secret-token"}
    # The script was told neither the token nor where the runner's files are.
    assert done.output.count("[]\n") == 2 and "secret-token" not in done.output

    runner.commit(train=TRAIN.format(times=1))
    done = runner.run(base, arguments="2", threshold="5%", fail_on_increase="true")
    assert done.status == 0 and done.outputs["failed"] == "false", done.output
    assert len(api.comments) == 121 and "**No change**" in api.comments[-1]["body"]
    assert runner.git("worktree", "list").count("\n") == 0  # both were taken away


def test_growth_fails_the_job_where_it_should_and_without_the_right_to_comment(runner: Runner, api: Api) -> None:
    api.allowed = False
    base = runner.commit(train=TRAIN.format(times=1))
    runner.commit(train=TRAIN.format(times=2))
    done = runner.run(base, arguments="1", fail_on_increase="true")
    assert done.status == 1 and "::error::The memory of train.py grew by more than 0%" in done.output
    assert "the token may not comment" in done.output and "+1.00 GiB" in done.summary and len(api.comments) == 120


def test_a_new_script_and_one_that_runs_out_are_told_as_they_are(runner: Runner, api: Api) -> None:
    base = runner.commit(other="")
    runner.commit(train=TRAIN.format(times=1))
    done = runner.run("main~1", arguments="3", number=None)
    assert done.status == 0 and "It is new" in done.summary and "It needs 3." in done.summary, done.output
    assert "there is no pull request" in done.output and len(api.comments) == 120

    base = runner.commit(train=TRAIN.format(times=1))
    runner.commit(train=TRAIN.format(times=100))
    done = runner.run(base, arguments="2", gpu="h100", token="")
    assert done.status == 0 and "head runs out of memory at `train.py:4`" in done.summary, done.output
    assert "there is no token" in done.output


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"script": "none.py"}, "There is no none.py"),
        ({"script": "../train.py"}, "not within the repository"),
        ({"script": "fails.py"}, "fails.py fails for reasons of its own: ValueError: no data"),
        ({"gpu": "h1000"}, "tonnage run ended with status 2"),
        ({"base": "no-such-branch"}, "git fetch failed"),
        ({"base": ""}, "There is no base to compare with"),
        ({"base": "--upload-pack=x"}, "is no commit"),
        ({"arguments": "'open"}, "cannot be taken apart"),
    ],
)
def test_what_is_wrong_is_said_in_words(runner: Runner, inputs: dict[str, str], words: str) -> None:
    runner.commit(train="print('nothing')\n", fails="raise ValueError('no data')\n")
    done = runner.run(**{"base": "main"} | inputs)
    assert done.status != 0 and words in done.output and "tonnage/integrations" not in done.output, done.output


def test_names_of_strangers_are_no_markdown() -> None:
    from tonnage.report.runs.diff import code

    assert code("a`b|c @someone <b>") == "`a'b\\|c @someone <b>`"
    assert len(code("x" * 500)) < 100 and code("") == "`elsewhere`"
