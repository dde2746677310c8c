import importlib
import inspect
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import tonnage
from support import training_run

PUBLIC = {
    "assume",
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


def test_a_recording_is_read_by_a_plain_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/notebooks.md has it."""
    monkeypatch.chdir(tmp_path)
    tonnage.write_recording("run.tonnage", training_run())
    assert tonnage.read_recording("run.tonnage").allocations == training_run().allocations


def test_fit_says_what_it_takes() -> None:
    parameters = inspect.signature(tonnage.fit).parameters
    assert list(parameters)[:4] == ["model", "optimizer", "loss", "sample"]
    assert {"budget", "mesh", "engine", "config"} < set(parameters)
    assert all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values())


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with all that is installed here but torch and what is built on it."""
    packages = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith(("torch", "functorch", "transformers", "accelerate", "lightning", "pytorch")):
            (packages / path.name).symlink_to(path)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(tonnage.__file__).parents[1]), str(packages)])}


def said(code: str, environment: dict[str, str] | None = None) -> str:
    words = [sys.executable, *(["-S"] if environment else []), "-c", f"import tonnage\n{code}"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("with_torch", [True, False])
def test_help_shows_every_name(no_torch: dict[str, str], with_torch: bool) -> None:
    code = "import pydoc; print(pydoc.plain(pydoc.render_doc(tonnage)))"
    shown = said(code, None if with_torch else no_torch)
    assert [name for name in PUBLIC - {"__version__"} if name not in shown] == []


@pytest.mark.parametrize(
    ("call", "part"),
    [
        ("tonnage.fit(None, None, loss=None, sample=None)", "tonnage[fit]"),
        ("tonnage.largest_batch(None, None)", "tonnage[fit]"),
        ("tonnage.fit_trainer(None)", "tonnage[fit]"),
        ("tonnage.record_on_oom('oom.tonnage')", "pip install torch"),
        ("tonnage.virtual_gpu('h200').__enter__()", "tonnage[torch]"),
    ],
)
def test_without_torch_a_call_says_what_to_install(no_torch: dict[str, str], call: str, part: str) -> None:
    assert part in said(f"try: {call}\nexcept tonnage.TonnageError as error: print(error.words)", no_torch)


def test_python_m_is_the_command() -> None:
    words = [sys.executable, "-m", "tonnage", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"tonnage {tonnage.__version__}\n"


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
