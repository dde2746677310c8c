"""Ask the planner as a person does, by the words of the command, and read its figures."""

import contextlib
import io
import json
import shlex
from typing import Any

from tonnage.commands import plan_rl, plan_serve, plan_train

COMMANDS = {"plan train": plan_train.command, "plan serve": plan_serve.command, "plan rl": plan_rl.command}


def answer(words: str) -> dict[str, Any]:
    """The figures of a command, which is written as in the docs; `status` among them is how it exits."""
    name, command = next((name, command) for name, command in COMMANDS.items() if words.startswith(f"tonnage {name} "))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = command([*shlex.split(words.removeprefix(f"tonnage {name} ")), "--json", "-"])
    return {**json.loads(out.getvalue()), "status": status}
