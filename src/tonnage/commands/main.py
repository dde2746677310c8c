"""The `tonnage` command. Errors become words here and nowhere else; no work is done here."""

import sys
from typing import NoReturn

from tonnage.errors import TonnageError


def main() -> NoReturn:
    """Run a command; exit 0 it fits or worked, 1 it does not fit, 2 the request was wrong."""
    try:
        sys.exit(_run(sys.argv[1:]))
    except TonnageError as error:
        print(f"tonnage: {error.words}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough.
        sys.stderr.close()
        sys.exit(0)


def _run(words: list[str]) -> int | None:
    if words[:1] == ["run"]:
        from tonnage.commands import run

        return run.command(words[1:])
    from tonnage.commands.app import app

    app()
    return None
