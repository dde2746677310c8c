"""Every command as one typer application; `run`, `record` and `serve` are listed here and parse their own words."""

from importlib import import_module
from inspect import getdoc

import typer

from tonnage import __version__
from tonnage.commands.completion import add_command
from tonnage.report.lines import report_width

app = typer.Typer(
    name="tonnage",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": report_width()},
)


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """How much can this GPU carry? Will it fit, where did the memory go, and why did it run out."""
    if version:
        typer.echo(f"tonnage {__version__}")
        raise typer.Exit


for name in ("run", "certify", "record", "serve"):
    add_command(app, name)
plan = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="What a model needs, and the fastest way that fits."
)
for name in ("plan train", "plan serve", "plan rl"):
    add_command(plan, name)
app.add_typer(plan, name="plan")
# A command's short help is given, as typer would cut the first sentence of the long one.
for name in ("gpu", "show", "diff", "explain", "replay", "roofline", "watch", "mcp"):
    command = getattr(import_module(f"tonnage.commands.{name}"), name)
    app.command(name, short_help=(getdoc(command) or "").partition("\n\n")[0])(command)
