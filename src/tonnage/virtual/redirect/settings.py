"""Which folders are written in place, and which variables keep loggers offline: settings.toml."""

import getpass
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

THROUGH = "TONNAGE_WRITE_THROUGH"  # folders that scripts may write in place, separated as in PATH


def folders_in_place(environment: Mapping[str, str]) -> list[str]:
    """Return the folders that are written in place: caches, and those that the user names."""
    places = _places(environment)
    folders = []
    for variable, row in _settings()["caches"].items():
        named = environment.get(variable) or row["usual"].format_map(places)
        folders.append(named)
    folders += filter(None, environment.get(THROUGH, "").split(os.pathsep))
    return [os.path.realpath(os.path.expanduser(folder)) for folder in folders]


def folders_of_compiled_modules() -> list[str]:
    """Return the folders of installed packages, whose __pycache__ is written in place; a script's own is not."""
    own_packages = Path(__file__).parents[2]
    installed = {sys.prefix, sys.base_prefix, str(own_packages), *filter(_is_of_packages, sys.path)}
    return sorted(os.path.realpath(folder) for folder in installed)


def offline_environment(scratch: Path) -> dict[str, str]:
    """Return the variables that keep loggers off the network."""
    return {name: value.format(scratch=scratch) for name, value in _settings()["offline"].items()}


def _is_of_packages(folder: str) -> bool:
    return os.path.basename(folder) in ("site-packages", "dist-packages")


def _places(environment: Mapping[str, str]) -> dict[str, str]:
    home = os.path.expanduser("~")
    cache_folder = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    return {
        "home": home,
        "cache": cache_folder,
        "temporary": tempfile.gettempdir(),
        "user": _user(),
        "triton": environment.get("TRITON_HOME") or home,
        "huggingface": environment.get("HF_HOME") or f"{cache_folder}/huggingface",
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return str(os.getuid())


@cache
def _settings() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("settings.toml").read_text("utf-8"))
