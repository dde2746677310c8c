"""What a shell offers after TAB to the commands that parse their own words: their options, cards, presets, files.

typer completes everything else; `tonnage --install-completion` teaches the shell.
"""

from argparse import Action, ArgumentParser
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

try:  # typer brings its own click since 0.26
    from typer._click.shell_completion import CompletionItem
except ImportError:  # pragma: no cover
    from click.shell_completion import CompletionItem  # type: ignore[assignment]


def add_command(app: typer.Typer, name: str, module: Any) -> None:
    """List a command that parses its own words in the help of typer; `commands.main` calls the command itself."""
    make_parser = module._parser

    @app.command(
        name,
        short_help=module.SUMMARY,
        cls=parsed_by(make_parser),
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    def listed(words: list[str] = typer.Argument(None, autocompletion=values_of(make_parser))) -> None:
        raise typer.Exit(module.command(words))


def parsed_by(make_parser: Callable[[], ArgumentParser]) -> type[TyperCommand]:
    """Make the class of a command whose options are those of an argparse parser."""

    class Command(TyperCommand):
        def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
            """Offer the parser's options; typer asks for them where a word begins with a dash."""
            options = {name: action.help for action in make_parser()._actions for name in action.option_strings}
            return [CompletionItem(name, help=words) for name, words in options.items() if name.startswith(incomplete)]

    return Command


def values_of(make_parser: Callable[[], ArgumentParser]) -> Callable[..., list[str]]:
    """Make the function that offers values: after an option its own, else presets where the command plans.

    Where it offers nothing, the shell offers files.
    """

    def offer(ctx: Any, args: list[str], incomplete: str) -> list[str]:
        words = args or ctx.args or list((ctx.params or {}).get("words") or ())
        option = next((a for a in make_parser()._actions if words and words[-1] in a.option_strings), None)
        return [value for value in _values(option, make_parser()) if value.startswith(incomplete)]

    return offer


def _values(option: Action | None, parser: ArgumentParser) -> list[str]:
    from tonnage.hardware import all_gpus
    from tonnage.models import all_presets

    if option is None:
        return list(all_presets()) if parser.prog.startswith("tonnage plan") else []
    if "--gpu" in option.option_strings or "--gpus" in option.option_strings:
        return [card.key for card in all_gpus()]
    return [str(choice) for choice in option.choices or ()]
