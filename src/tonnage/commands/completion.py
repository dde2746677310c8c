"""What a shell offers after TAB to the commands that parse their own words: their options, cards, presets, files.

typer completes everything else; `tonnage --install-completion` teaches the shell.
"""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from tonnage.commands.options import parser_of, summary_of

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
