"""`tonnage plan`: what a model needs before there is a script; `train`, `serve` and `rl`."""

import typer

from tonnage.commands import plan_rl, plan_serve, plan_train
from tonnage.commands.completion import parsed_by, values_of

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="What a model needs, and the fastest way that fits."
)

_OWN_WORDS = {"ignore_unknown_options": True, "help_option_names": []}


@app.command("train", short_help=plan_train.SUMMARY, cls=parsed_by(plan_train._parser), context_settings=_OWN_WORDS)
def train(words: list[str] = typer.Argument(None, autocompletion=values_of(plan_train._parser))) -> None:
    """Listed for `tonnage plan --help`; `commands.main` calls the command itself."""
    raise typer.Exit(plan_train.command(words))


@app.command("serve", short_help=plan_serve.SUMMARY, cls=parsed_by(plan_serve._parser), context_settings=_OWN_WORDS)
def serve(words: list[str] = typer.Argument(None, autocompletion=values_of(plan_serve._parser))) -> None:
    """Listed likewise."""
    raise typer.Exit(plan_serve.command(words))


@app.command("rl", short_help=plan_rl.SUMMARY, cls=parsed_by(plan_rl._parser), context_settings=_OWN_WORDS)
def rl(words: list[str] = typer.Argument(None, autocompletion=values_of(plan_rl._parser))) -> None:
    """Listed likewise."""
    raise typer.Exit(plan_rl.command(words))
