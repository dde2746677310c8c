"""Tonnage for an assistant: a server of the Model Context Protocol whose tools are Tonnage's own commands.

    folder.py    which files a request may name
    child.py     a command in a process of its own: its figures, its words, its end
    answers.py   of a command's figures, the few that matter, and a sentence
    session.py   how a command becomes an answer
    tools.py     the tools: what each asks for, and the words of the command that answers it
    server.py    the server itself

Nothing here computes anything about memory. `mcp`, the protocol's SDK, is imported by `session`, `tools` and `server` alone.
"""
