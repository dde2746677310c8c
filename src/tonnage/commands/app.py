"""Every command as one typer application; `run`, `record` and `serve` are listed here and parse their own words.

Of these a shell is offered options, cards, presets and files after TAB; typer completes everything else, and
`tonnage --install-completion` teaches the shell.
"""

from importlib import import_module
from inspect import getdoc
from typing import Any

import typer
from typer.core import TyperCommand

from tonnage import __version__
from tonnage.commands.options import parser_of, summary_of
from tonnage.report.lines import report_width

try:  # typer brings its own click since 0.26
    from typer._click.shell_completion import CompletionItem
except ImportError:  # pragma: no cover
    from click.shell_completion import CompletionItem  # type: ignore[assignment]


def add_command(app: typer.Typer, command: str) -> None:
    """List a command that parses its own words in the help of typer; `commands.main` calls the command itself."""

    class Command(TyperCommand):
        def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
            """Offer the parser's options; typer asks for them where a word begins with a dash."""
            options = {name: action.help for action in parser_of(command)._actions for name in action.option_strings}
            return [CompletionItem(name, help=words) for name, words in options.items() if name.startswith(incomplete)]

    def offer(ctx: Any, args: list[str], incomplete: str) -> list[str]:
        """Offer values for an option, or presets where the command plans; where there are none, the shell offers files."""
        from tonnage.hardware import all_gpus
        from tonnage.models import all_presets

        words = args or ctx.args or list((ctx.params or {}).get("words") or ())
        option = next((a for a in parser_of(command)._actions if words and words[-1] in a.option_strings), None)
        if option is None:
            values = list(all_presets()) if command.startswith("plan") else []
        elif {"--gpu", "--gpus"} & {*option.option_strings}:
            values = [card.key for card in all_gpus()]
        else:
            values = [str(choice) for choice in option.choices or ()]
        return [value for value in values if value.startswith(incomplete)]

    @app.command(
        command.rpartition(" ")[2],
        short_help=summary_of(command),
        cls=Command,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    def listed(words: list[str] = typer.Argument(None, autocompletion=offer)) -> None:
        raise typer.Exit(import_module(f"tonnage.commands.{command.replace(' ', '_')}").command(words))


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
