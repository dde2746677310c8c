"""The wheel: built libraries inside and a tag that says so where there is a C compiler, a pure one where there is none."""

import importlib.util
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import tonnage
from tonnage.virtual.driver import build
from tonnage.virtual.redirect import build as redirection

ROOT = Path(__file__).parents[2]
INSIDE = "tonnage/virtual/driver/lib"
REDIRECTION = f"tonnage/virtual/redirect/lib/{redirection.LIBRARY}"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed: make setup"
)


def make_wheel(out: Path, kind: str = "wheel", **environment: str) -> tuple[Path, str]:
    """Build a wheel as pip would; return it and what was said."""
    inherited = {name: value for name, value in os.environ.items() if name != "TONNAGE_TARGET"}
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel, done.stdout + done.stderr


def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def libraries_in(wheel: Path) -> set[str]:
    return {name.removeprefix(f"{INSIDE}/") for name in zipfile.ZipFile(wheel).namelist() if name.startswith(INSIDE)}


def has_redirection(wheel: Path) -> bool:
    return REDIRECTION in zipfile.ZipFile(wheel).namelist()


def test_wheel_carries_libraries_that_load(tmp_path: Path) -> None:
    compiler, tag = hook().find_compiler("")
    if not compiler:
        pytest.skip(f"no wheel with libraries can be built here: {tag}")
    wheel, _ = make_wheel(tmp_path)

    assert wheel.name == f"tonnage-{tonnage.__version__}-py3-none-{tag}.whl"
    assert tag.endswith(platform.machine())
    names = {cuda: {build.CORE, *(library.soname for library in build.libraries(cuda))} for cuda in (12, 13)}
    assert libraries_in(wheel) == {f"cuda{cuda}/{name}" for cuda, inside in names.items() for name in inside}
    assert has_redirection(wheel)

    # The loader gives a caller the symbols under the version that it asks for.
    zipfile.ZipFile(wheel).extractall(tmp_path)
    folder = tmp_path / INSIDE / "cuda13"
    ask = (
        "import ctypes, sys\n"
        "core, runtime = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in sys.argv[1:]]\n"
        "find = ctypes.CDLL(None).dlvsym\n"
        "find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]\n"
        "print(*(bool(find(runtime._handle, b'cudaMalloc', b'libcudart.so.%d' % n)) for n in (12, 13)))\n"
    )
    command = [sys.executable, "-c", ask, str(folder / build.CORE), str(folder / "libcudart.so.13")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr

    # A program that is started with the other library writes into the scratch folder.
    scratch = tmp_path / "scratch"
    for part in ("files", "gone", "views"):
        (scratch / part).mkdir(parents=True)
    (scratch / "state").write_bytes(bytes(1 << 18))
    (scratch / "through").touch()
    environment = os.environ | {"LD_PRELOAD": str(tmp_path / REDIRECTION), "TONNAGE_REDIRECT": str(scratch)}
    subprocess.run(["/bin/sh", "-c", "echo x > note"], cwd=tmp_path, env=environment, check=True)
    assert not (tmp_path / "note").exists()
    assert (scratch / "files" / (tmp_path / "note").relative_to("/")).read_text() == "x\n"


def test_without_compiler_the_wheel_is_pure_and_says_so(tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang"):
        pytest.skip("ziglang is installed, and it is a compiler")
    (tmp_path / "empty").mkdir()
    wheel, said = make_wheel(tmp_path, PATH=str(tmp_path / "empty"), CC="")

    assert wheel.name == f"tonnage-{tonnage.__version__}-py3-none-any.whl"
    assert libraries_in(wheel) == set()
    assert not has_redirection(wheel)
    assert "A pure wheel, without native libraries: no C compiler was found" in said


def test_editable_install_compiles_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("editables") is None:
        pytest.skip("editables is not installed: make setup")
    wheel, _ = make_wheel(tmp_path, "wheel:editable")
    assert wheel.name == f"tonnage-{tonnage.__version__}-py3-none-any.whl"
    assert libraries_in(wheel) == set()
    assert not has_redirection(wheel)


def test_unknown_target_is_refused() -> None:
    with pytest.raises(
        ValueError, match="'riscv64-linux-gnu'; the targets are x86_64-linux-gnu and aarch64-linux-gnu, and any"
    ):
        hook().find_compiler("riscv64-linux-gnu")


def test_pure_wheel_where_the_machine_is_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    compiler, reason = hook().find_compiler("")
    assert compiler == []
    assert "this is darwin" in reason
