"""transformers' index of itself, kept between runs."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tonnage.virtual.companions import keep_index


@pytest.fixture
def import_utils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The real module, as a fresh import gives it, with a cache folder of its own."""
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    spec = importlib.util.find_spec("transformers.utils.import_utils")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def models_of(module: ModuleType) -> Path:
    return Path(str(module.__file__)).parents[1] / "models"


def test_the_kept_index_is_the_index(import_utils: ModuleType, tmp_path: Path) -> None:
    models = models_of(import_utils)
    made: dict[Any, Any] = import_utils.define_import_structure(models, prefix="models")
    calls: list[Any] = []
    plain = import_utils.define_import_structure

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return plain(*arguments)

    for _ in range(2):
        import_utils.define_import_structure = counted  # type: ignore[attr-defined]
        keep_index(import_utils)
        assert import_utils.define_import_structure(models, prefix="models") == made
        assert import_utils.define_import_structure(str(models / "__init__.py")) == plain(str(models))
    assert len(calls) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".index"]


def test_the_folder_of_one_model_is_read_as_ever(import_utils: ModuleType) -> None:
    gpt2 = str(models_of(import_utils) / "gpt2" / "__init__.py")
    expected = import_utils.define_import_structure(gpt2)
    keep_index(import_utils)
    assert import_utils.define_import_structure(gpt2) == expected


def test_a_damaged_file_is_made_anew(import_utils: ModuleType, tmp_path: Path) -> None:
    models = models_of(import_utils)
    keep_index(import_utils)
    whole = import_utils.define_import_structure(models)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    keep_index(import_utils)
    assert import_utils.define_import_structure(models) == whole


def test_a_checkout_that_somebody_edits_is_read_afresh(tmp_path: Path) -> None:
    module = ModuleType("import_utils")
    module.__file__ = str(tmp_path / "transformers" / "utils" / "import_utils.py")
    plain = module.define_import_structure = object()  # type: ignore[attr-defined]
    keep_index(module)
    assert module.define_import_structure is plain
