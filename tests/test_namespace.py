import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tonnage

PUBLIC = {
    "Category",
    "Gpu",
    "Ledger",
    "Recording",
    "TonnageError",
    "__version__",
    "find_gpu",
    "fit",
    "fit_trainer",
    "largest_batch",
    "longest_sequence",
    "read_recording",
    "record_on_oom",
    "virtual_gpu",
    "write_recording",
}


def test_the_public_names_are_exactly_these() -> None:
    assert set(tonnage.__all__) == PUBLIC == set(dir(tonnage))
    assert tonnage.__all__ == sorted(tonnage.__all__)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"fit", "fit_trainer", "virtual_gpu"}))
def test_every_public_name_is_there(name: str) -> None:
    home = tonnage._HOMES.get(name)
    expected = getattr(importlib.import_module(home), name) if home else tonnage.__version__
    assert getattr(tonnage, name) is expected


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tonnage.nothing  # type: ignore[attr-defined]


def test_the_version_is_the_package_s() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert f'version = "{tonnage.__version__}"' in pyproject.read_text()


WATCH = """
import sys
{code}
loaded = sorted(m for m in sys.modules if m.split(".")[0] in {{"torch", "numpy"}})
sys.exit(f"loaded {{loaded[:5]}}" if loaded else 0)
"""
COMMAND = """
from tonnage.commands.main import main
sys.argv = ["tonnage", *{words!r}]
try:
    main()
except SystemExit as done:
    assert done.code == 0, done.code
"""


def run_watched(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", WATCH.format(code=code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_tonnage_loads_no_torch() -> None:
    run_watched("import tonnage; tonnage.find_gpu('h200'); tonnage.read_recording; tonnage.Ledger")


@pytest.mark.parametrize("words", ["--help", "--version", "run --help", "show --help", "replay --help"])
def test_commands_without_torch_load_no_torch(words: str) -> None:
    run_watched(COMMAND.format(words=words.split()))
