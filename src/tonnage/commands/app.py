"""Every command as one typer application; `run`, `record` and `serve` are listed here and parse their own words."""

from inspect import getdoc

import typer

from tonnage import __version__
from tonnage.commands import certify, diff, explain, gpu, mcp, plan, record, replay, roofline, run, serve, show, watch
from tonnage.commands.completion import parsed_by, values_of
from tonnage.report.lines import report_width

app = typer.Typer(
    name="tonnage",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": report_width()},
)
_OWN_WORDS = {"ignore_unknown_options": True, "help_option_names": []}


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """How much can this GPU carry? Will it fit, where did the memory go, and why did it run out."""
    if version:
        typer.echo(f"tonnage {__version__}")
        raise typer.Exit


# A command's short help is given, as typer would cut the first sentence of the long one.
@app.command("run", short_help=run.SUMMARY, cls=parsed_by(run._parser), context_settings=_OWN_WORDS)
def run_command(words: list[str] = typer.Argument(None, autocompletion=values_of(run._parser))) -> None:
    """Listed for `tonnage --help`; `commands.main` calls the command itself."""
    raise typer.Exit(run.command(words))


@app.command("certify", short_help=certify.SUMMARY, cls=parsed_by(certify._parser), context_settings=_OWN_WORDS)
def certify_command(words: list[str] = typer.Argument(None, autocompletion=values_of(certify._parser))) -> None:
    """Listed for `tonnage --help`; `commands.main` calls the command itself."""
    raise typer.Exit(certify.command(words))


@app.command("record", short_help=record.SUMMARY, cls=parsed_by(record._parser), context_settings=_OWN_WORDS)
def record_command(words: list[str] = typer.Argument(None, autocompletion=values_of(record._parser))) -> None:
    """Listed for `tonnage --help`; `commands.main` calls the command itself."""
    raise typer.Exit(record.command(words))


@app.command("serve", short_help=serve.SUMMARY, cls=parsed_by(serve._parser), context_settings=_OWN_WORDS)
def serve_command(words: list[str] = typer.Argument(None, autocompletion=values_of(serve._parser))) -> None:
    """Listed for `tonnage --help`; `commands.main` calls the command itself."""
    raise typer.Exit(serve.command(words))


app.add_typer(plan.app, name="plan")
for command in (gpu.gpu, show.show, diff.diff, explain.explain, replay.replay, roofline.roofline, watch.watch, mcp.mcp):
    app.command(command.__name__, short_help=(getdoc(command) or "").partition("\n\n")[0])(command)
