"""Keeps what a script writes during a virtual run away from the user's files.

`native/` redirects the C library's functions in this process and its children: what is opened for writing, renamed or
deleted goes to a scratch folder, and later reads see it there. `redirection` starts and ends that, `scratch` reads
and empties the folder.
"""

from tonnage.virtual.redirect.redirection import Redirection

__all__ = ["Redirection"]
