"""Every command as one typer application; `run`, `record` and `serve` are listed here and parse their own words."""

import typer

from tonnage import __version__
from tonnage.commands import diff, explain, gpu, plan, record, replay, roofline, run, serve, show, watch
from tonnage.commands.completion import parsed_by, values_of

_OWN_WORDS = {"ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="tonnage",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """How much can this GPU carry? Will it fit, where did the memory go, and why did it run out."""
    if version:
        typer.echo(f"tonnage {__version__}")
        raise typer.Exit


@app.command("run", help=run.SUMMARY, cls=parsed_by(run._parser), context_settings=_OWN_WORDS)
def run_command(words: list[str] = typer.Argument(None, autocompletion=values_of(run._parser))) -> None:
    """Listed for `tonnage --help`; `commands.main` calls the command itself."""
    raise typer.Exit(run.command(words))


@app.command("record", help=record.SUMMARY, cls=parsed_by(record._parser), context_settings=_OWN_WORDS)
def record_command(words: list[str] = typer.Argument(None, autocompletion=values_of(record._parser))) -> None:
    """Listed for `tonnage --help`; `commands.main` calls the command itself."""
    raise typer.Exit(record.command(words))


@app.command("serve", help=serve.SUMMARY, cls=parsed_by(serve._parser), context_settings=_OWN_WORDS)
def serve_command(words: list[str] = typer.Argument(None, autocompletion=values_of(serve._parser))) -> None:
    """Listed for `tonnage --help`; `commands.main` calls the command itself."""
    raise typer.Exit(serve.command(words))


app.command("gpu")(gpu.gpu)
app.add_typer(plan.app, name="plan")
app.command("show")(show.show)
app.command("diff")(diff.diff)
app.command("explain")(explain.explain)
app.command("replay")(replay.replay)
app.command("roofline")(roofline.roofline)
app.command("watch")(watch.watch)
