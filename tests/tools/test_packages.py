"""What is published: packages that PyPI takes and that install into a clean environment, the workflow, the site."""

import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import tonnage

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed: make setup")


def call(*words: object, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the pure wheel as macOS gets it, built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder)
    with tarfile.open(folder / f"tonnage-{tonnage.__version__}.tar.gz") as sdist:
        sdist.extractall(folder / "source", filter="data")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    call("env", "TONNAGE_TARGET=any", *build, cwd=folder / "source" / f"tonnage-{tonnage.__version__}")
    return folder


@needs("hatchling", "hatch_fancy_pypi_readme", "twine")
def test_packages_pass_pypi_s_checks(packages: Path) -> None:
    names = sorted(packages.glob("tonnage-*"))
    assert [name.name for name in names] == [
        f"tonnage-{tonnage.__version__}-py3-none-any.whl",
        f"tonnage-{tonnage.__version__}.tar.gz",
    ]
    call(sys.executable, "-m", "twine", "check", "--strict", *names)


@needs("hatchling", "hatch_fancy_pypi_readme")
def test_long_description_leads_to_the_release(packages: Path) -> None:
    archive = zipfile.ZipFile(next(packages.glob("*.whl")))
    name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = message_from_bytes(archive.read(name))
    text = str(metadata.get_payload())
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("https://", "#"))] == []
    assert f"/tonnage/v{tonnage.__version__}/docs/images/show-page.png" in text
    assert "<!-- output" not in text
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert {"Homepage", "Documentation", "Changelog", "Issues"} == {
        url.partition(",")[0] for url in metadata.get_all("Project-URL", [])
    }


@needs("hatchling", "hatch_fancy_pypi_readme")
def test_sdist_has_what_the_tests_read(packages: Path) -> None:
    tracked = call("git", "ls-files").splitlines() if (ROOT / ".git").exists() else []
    inside = packages / "source" / f"tonnage-{tonnage.__version__}"
    assert [path for path in tracked if not (inside / path).exists()] == []


@needs("hatchling", "hatch_fancy_pypi_readme")
def test_wheel_runs_in_a_clean_environment(packages: Path, tmp_path: Path) -> None:
    """Its requirements are lent by this environment, so that nothing is fetched."""
    call(sys.executable, "-m", "venv", tmp_path / "clean")
    wheel = next(packages.glob("*.whl"))
    call(tmp_path / "clean/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = next((tmp_path / "clean/lib").glob("python*/site-packages"))
    (site / "lent.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    ask = "import tonnage; print(tonnage.__file__)"
    assert str(tmp_path) in call(tmp_path / "clean/bin/python", "-E", "-c", ask, cwd=tmp_path)
    clean = ["env", "-u", "PYTHONPATH", tmp_path / "clean/bin/tonnage"]
    assert tonnage.__version__ in call(*clean, "--version", cwd=tmp_path)
    assert "fits" in call(*clean, "plan", "train", "llama-3.1-8b", "--gpus", "8xh100", cwd=tmp_path)


@needs("check_jsonschema")
def test_workflows_are_valid() -> None:
    """`make lint` asks zizmor, too, what could be misused."""
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert [path.stem for path in workflows] == ["packages", "site"]
    call(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    call(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions", ROOT / "action.yml")


@needs("mkdocs", "material")
def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    call(BIN / "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path)
    assert "Tonnage is how much a ship can carry" in (tmp_path / "index.html").read_text()
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    missing = [page for page in pages if not (tmp_path / str(page).replace("README", ".") / "index.html").exists()]
    assert missing == []
