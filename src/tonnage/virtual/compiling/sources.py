"""Maps lines of Inductor's generated code to lines of the script."""

import linecache
import os
import re
import sys

_ORIGIN = re.compile(r"# Topologically Sorted Source Nodes: \[.*?\], Original ATen: \[(.*?)\]")
_FARTHEST = 60  # lines between a comment and the call or allocation that it describes


def source_of(code_file: str, line_number: int) -> tuple[str, str] | None:
    """Return the script's innermost line ("train.py:41") and the operator ("aten.mm") for a line of generated code.

    None if the file is not one of Inductor's; either part is empty where Inductor does not know it.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is None or code_file not in codecache.PyCodeCache.linemaps:
        return None
    frames = codecache.PyCodeCache.stack_frames_for_code(code_file, line_number)
    line = f"{os.path.basename(frames[0]['filename'])}:{frames[0]['line']}" if frames else ""
    for number in range(line_number, max(line_number - _FARTHEST, 0), -1):
        if found := _ORIGIN.search(linecache.getline(code_file, number)):
            return line, found[1].split(", ")[-1]
    return line, ""
