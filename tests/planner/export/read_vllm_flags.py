"""Write `data/vllm-VERSION.json`: the flags of vLLM's own parser, from its unpacked source archive.

    python read_vllm_flags.py vllm-0.32.0 > data/vllm-0.32.0.json

vLLM is too large to install for a test (its wheel is 400 MB and brings another torch). Its parser is built here from
the source, as its documentation is: on a platform without a GPU, with stand-ins for libraries that matter to serving
alone. The small ones that the parser itself needs are named by the import errors of a first run. `server` in the data
are the two flags of the server around the engine that scripts set, copied by hand from `FrontendArgs`.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import types
from argparse import Action
from typing import Any
from unittest.mock import MagicMock

STOOD_IN = "xgrammar openai openai_harmony mistral_common llguidance partial_json_parser cv2 fastapi uvloop".split()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that hold whatever is asked of them: a class for a capital, else anything."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.split(".")[0] in STOOD_IN
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = self.attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""

    @staticmethod
    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else MagicMock(name=name)


def kind_of(action: Action) -> str | list[str]:
    """What a flag takes: one of some words, a number, any text, nothing."""
    if action.choices:
        return [str(choice) for choice in action.choices]
    if action.nargs == 0:
        return "switch"
    name = getattr(action.type, "__name__", "")
    return "int" if "int" in name else "float" if name == "float" else "text"


def main(source: str) -> None:
    sys.path.insert(0, source)
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    sys.meta_path.append(StandIns())
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.version import __version__

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    flags = {name: kind_of(action) for action in parser._actions for name in action.option_strings}
    print(json.dumps({"vllm": __version__, "flags": dict(sorted(flags.items()))}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
