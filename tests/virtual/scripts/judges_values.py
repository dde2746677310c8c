"""Runs every program of the folder `values`, and writes how each ended, and what its end depends on, as JSON."""

import json
import runpy
import sys
from pathlib import Path

from tonnage.virtual import session
from tonnage.virtual.going_on import Stopped

ended = {}
for program in sorted((Path(__file__).parent / "values").glob("*.py")):
    stand_ins = session._current.stand_ins
    stand_ins.start_again()
    try:
        runpy.run_path(str(program), run_name="__main__")
        ended[program.stem] = ["", ""]
    except (Exception, SystemExit, Stopped) as error:
        ended[program.stem] = [type(error).__name__, stand_ins.explain(error)]
Path(sys.argv[1]).write_text(json.dumps(ended))
