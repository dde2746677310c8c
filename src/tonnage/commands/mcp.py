"""`tonnage mcp`: a server through which an assistant asks Tonnage."""

from pathlib import Path

import typer

from tonnage.errors import MissingPart, RequestError


def mcp(
    folder: Path = typer.Option(None, "--folder", metavar="DIR", help="What it may read (default: this folder)."),
    allow_run: bool = typer.Option(False, "--allow-run", help="Run scripts without asking a person first."),
    port: int = typer.Option(None, "--port", min=1, max=65535, help="Serve HTTP on 127.0.0.1, not standard input."),
) -> None:
    """Serve plan, run, show, explain and diff to an assistant, over the Model Context Protocol."""
    root = folder or Path.cwd()
    if not root.is_dir():
        raise RequestError(f"There is no folder {root}.", hint="Name the folder of your project with --folder.")
    if folder is None and root == Path(root.anchor):
        hint = "Name the folder of your project: tonnage mcp --folder DIR"
        raise RequestError(f"The server was started in {root}, and would let an assistant read all of it.", hint=hint)
    try:
        from tonnage.assistant.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tonnage"):
            raise
        problem = f"tonnage mcp needs {error.name}, which is not installed in this environment."
        raise MissingPart(problem, hint="Install it: pip install 'tonnage[mcp]'") from None
    serve(root, allow_run=allow_run, port=port)
