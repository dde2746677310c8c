"""The GitHub Action: runs a script at the base and at the head of a pull request, compares them, and comments.

    python -m tonnage.integrations.pull_request measure    two virtual runs, their difference, the job's summary
    python -m tonnage.integrations.pull_request report     a comment, which later pushes update; then the verdict

These are two steps so that the script, which the pull request may have changed, never sees the token of the second.
Inputs come from the environment, as named in action.yml; files between the steps are in RUNNER_TEMP.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tonnage.errors import RequestError, TonnageError
from tonnage.report.runs.diff import code
from tonnage.units import format_bytes
from tonnage.untrusted import clipped

_TIMEOUT_S = 30
_MOST_PAGES = 30  # of a hundred comments each
_LONGEST_COMMENT = 60_000  # characters; GitHub's limit is 65,536
# Hidden from scripts: files that later steps read, and the token.
_KEPT_FROM_SCRIPTS = "GITHUB_ENV GITHUB_PATH GITHUB_OUTPUT GITHUB_STATE GITHUB_STEP_SUMMARY GITHUB_TOKEN".split()


def main() -> int:
    """Run one of the two steps and return the exit status."""
    step = {"measure": measure, "report": report}.get(" ".join(sys.argv[1:]))
    if step is None:
        print("usage: python -m tonnage.integrations.pull_request measure | report", file=sys.stderr)
        return 2
    try:
        return step(os.environ)
    except TonnageError as error:
        print(f"::error::{_annotation(error.words)}")
        return error.exit_code


def measure(given: Mapping[str, str]) -> int:
    """Run both commits, compare them, and write the table and the verdict for the next step."""
    folder = _folder(given)
    base = _commit(given.get("BASE_REF", ""))
    runs: dict[str, dict[str, Any] | None] = {}
    for name, commit in (("base", base), ("head", "HEAD")):
        print(f"::group::{name}: {commit[:12]}", flush=True)
        tree = folder / f"tree-{name}"
        _git("worktree", "add", "--quiet", "--detach", "--force", str(tree), commit)
        try:
            runs[name] = _run(given, tree, folder / f"{name}.tonnage")
        finally:
            _git("worktree", "remove", "--force", str(tree))
        print("::endgroup::", flush=True)
    head = runs["head"]
    script = given["SCRIPT"]
    if head is None:
        raise RequestError(f"There is no {script} in this pull request.", hint="Name it as it is in the repository.")
    if head["outcome"] == "error":
        raise RequestError(f"{script} fails for reasons of its own: {head['error']}", hint="Its output is above.")
    if head["outcome"] == "depends":
        raise RequestError(f"{script} {head['error']}", hint="Its output is above.")
    failed = False
    if runs["base"] and runs["base"]["outcome"] not in ("error", "depends"):
        limit = [f"--fail-above={_limit(given)}"] if _limit(given) else []
        words = ["diff", "base.tonnage", "head.tonnage", "--markdown", "diff.md", *limit]
        done = subprocess.run([sys.executable, "-m", "tonnage", *words], cwd=folder, check=False)
        if done.returncode not in (0, 1):
            raise RequestError(f"tonnage diff ended with status {done.returncode}.", hint="What it said is above.")
        failed = done.returncode == 1  # a peak grew beyond the limit
    else:
        why = "fails at the base" if runs["base"] else "is new"
        peak, capacity = format_bytes(head["peak_process_bytes"]), format_bytes(head["capacity_bytes"])
        text = f"### GPU memory of {code(script)} on {head['gpu']}\n\nIt {why}, so there is nothing to compare with. "
        verdict = "It needs" if head["fits"] else "It does not fit: it had taken"
        (folder / "diff.md").write_text(f"{text}{verdict} {peak} of {capacity}.\n")
    (folder / "verdict.json").write_text(json.dumps({"failed": failed}))
    _append(given, "GITHUB_STEP_SUMMARY", (folder / "diff.md").read_text())
    _append(given, "GITHUB_OUTPUT", f"failed={str(failed).lower()}\nreport={folder / 'diff.md'}\n")
    return 0


def report(given: Mapping[str, str]) -> int:
    """Create or update the comment; return 1 if memory grew too much and the job is to fail then."""
    folder = _folder(given)
    key = hashlib.sha256("\0".join(given.get(name, "") for name in ("SCRIPT", "GPU", "ARGUMENTS")).encode()).hexdigest()
    marker = f"<!-- tonnage memory-diff {key[:12]} -->"
    body = f"{marker}\n{(folder / 'diff.md').read_text()[:_LONGEST_COMMENT]}"
    try:
        print(f"::notice::{_comment(given, marker, body)}")
    except urllib.error.HTTPError as error:
        allowed = "the token may not comment" if error.code in (401, 403, 404) else f"GitHub answered {error.code}"
        print(f"::notice::No comment was made: {allowed}. The table is in the summary of the job.")
    except (OSError, ValueError) as error:
        print(f"::warning::No comment was made: {_annotation(str(error))}. The table is in the summary of the job.")
    failed = json.loads((folder / "verdict.json").read_text())["failed"]
    if failed and _is_true(given, "FAIL_ON_INCREASE"):
        print(f"::error::The memory of {_annotation(given['SCRIPT'])} grew by more than {_limit(given)}.")
        return 1
    return 0


def _run(given: Mapping[str, str], tree: Path, recording: Path) -> dict[str, Any] | None:
    """Return the figures of a virtual run in a worktree, or None if the script does not exist there."""
    script = Path(given["SCRIPT"])
    if script.is_absolute() or ".." in script.parts:
        problem = f"{script} is not within the repository."
        raise RequestError(problem, hint="Name the script as it is in the repository.")
    if not (tree / script).is_file():
        return None
    figures = recording.with_suffix(".json")
    words = ["--gpu", given["GPU"], "-o", str(recording), "--force", "--json", str(figures)]
    environment = {name: value for name, value in given.items() if name not in _KEPT_FROM_SCRIPTS}
    if given.get("PYTHON_PATH"):
        environment["PYTHONPATH"] = os.pathsep.join(str(tree / part) for part in given["PYTHON_PATH"].split(os.pathsep))
    try:
        arguments = shlex.split(given.get("ARGUMENTS", ""))
    except ValueError as error:
        raise RequestError(f"arguments cannot be taken apart: {error}.", hint="Close their quotes.") from None
    call = [sys.executable, "-m", "tonnage", "run", *words, str(script), *arguments]
    done = subprocess.run(call, cwd=tree, env=environment, check=False)
    if not figures.is_file():
        raise RequestError(f"tonnage run ended with status {done.returncode}.", hint="What it said is above.")
    return dict(json.loads(figures.read_bytes()))


def _limit(given: Mapping[str, str]) -> str:
    return given.get("THRESHOLD", "") or ("0%" if _is_true(given, "FAIL_ON_INCREASE") else "")


def _commit(ref: str) -> str:
    """Return the commit of a ref, fetching it if the checkout is too shallow."""
    if not ref or ref.startswith("-"):
        problem = f"{ref!r} is no commit to compare with." if ref else "There is no base to compare with."
        raise RequestError(problem, hint="Run the action on pull_request, or give base-ref.")
    for place in (ref, f"origin/{ref}", "FETCH_HEAD"):
        if place == "FETCH_HEAD":
            _git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", ref)
        words = ["git", "rev-parse", "--verify", "--quiet", f"{place}^{{commit}}"]
        found = subprocess.run(words, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    raise RequestError(
        f"There is no commit {ref!r}.", hint="Give base-ref a branch, a tag or a commit of this repository."
    )


def _git(*words: str) -> None:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        problem = f"git {words[0]} failed: {done.stderr.strip()}"
        raise RequestError(problem, hint="Check the repository out with fetch-depth: 0.")


def _comment(given: Mapping[str, str], marker: str, body: str) -> str:
    event = Path(given.get("GITHUB_EVENT_PATH", ""))
    number = json.loads(event.read_text()).get("pull_request", {}).get("number") if event.is_file() else None
    if not number or not given.get("TOKEN"):
        return f"No comment was made: there is no {'token' if number else 'pull request'}."
    issues = f"{given.get('GITHUB_API_URL', 'https://api.github.com')}/repos/{given['GITHUB_REPOSITORY']}/issues"
    for page in range(1, _MOST_PAGES + 1):
        comments = _call(given, "GET", f"{issues}/{number}/comments?per_page=100&page={page}")
        mine = next((comment for comment in comments if (comment["body"] or "").startswith(marker)), None)
        if mine:
            _call(given, "PATCH", f"{issues}/comments/{mine['id']}", body)
            return "The comment was changed."
        if len(comments) < 100:
            break
    _call(given, "POST", f"{issues}/{number}/comments", body)
    return "A comment was made."


def _call(given: Mapping[str, str], method: str, address: str, body: str | None = None) -> Any:
    headers = {
        "Authorization": f"Bearer {given['TOKEN']}",
        "Accept": "application/vnd.github+json",
        "User-Agent": "tonnage",
    }
    data = None if body is None else json.dumps({"body": body}).encode()
    request = urllib.request.Request(address, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        return json.loads(answer.read())


def _folder(given: Mapping[str, str]) -> Path:
    folder = Path(given.get("RUNNER_TEMP") or "/tmp") / "tonnage-memory-diff"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _append(given: Mapping[str, str], name: str, text: str) -> None:
    if given.get(name):
        with Path(given[name]).open("a") as file:
            file.write(text)


def _is_true(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "").strip().lower() in ("true", "1", "yes")


def _annotation(text: str) -> str:
    """Escape text for GitHub's workflow commands, on one line."""
    return clipped(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


if __name__ == "__main__":
    sys.exit(main())
