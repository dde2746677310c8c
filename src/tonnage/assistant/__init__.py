"""An MCP (Model Context Protocol) server whose tools are Tonnage's own commands.

    child.py     runs a command in a separate process: its figures, its output, its end
    answers.py   the relevant figures of a command, and a sentence
    session.py   which files a request may name, and how a command becomes an answer
    tools.py     the tools: their parameters, and the command line behind each
    server.py    the server itself

Nothing here computes anything about memory. Only `session`, `tools` and `server` import `mcp`, the protocol's SDK.
"""
