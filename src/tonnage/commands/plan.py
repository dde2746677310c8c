"""`tonnage plan`: what a model needs before there is a script; `train`, `serve` and `rl`."""

import typer

from tonnage.commands import plan_rl, plan_serve, plan_train
from tonnage.commands.completion import add_command

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="What a model needs, and the fastest way that fits."
)

for name, module in (("train", plan_train), ("serve", plan_serve), ("rl", plan_rl)):
    add_command(app, name, module)
