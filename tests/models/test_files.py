import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tonnage.errors import BadModel, MissingPart, UnknownModel
from tonnage.models.files import find_folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_folder(str(tmp_path)) == tmp_path


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"config\.json"):
        find_folder(str(tmp_path))


@pytest.mark.parametrize("name", ["nowhere", "./no/where/at/all", "a/b/c", "https://example.com/model"])
def test_what_is_neither_folder_nor_id(name: str) -> None:
    with pytest.raises(UnknownModel):
        find_folder(name)


def test_an_id_is_looked_up_in_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(hub_id: str, *, local_files_only: bool, allow_patterns: list[str]) -> str:
        asked.append((hub_id, local_files_only))
        assert not any("py" in pattern for pattern in allow_patterns)
        if hub_id != "some/model":
            raise FileNotFoundError("not there")
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert find_folder("some/model") == tmp_path
    with pytest.raises(UnknownModel) as caught:
        find_folder("other/model")
    assert "--online" in caught.value.hint
    with pytest.raises(UnknownModel, match="The hub gave no"):
        find_folder("other/model", online=True)
    assert asked == [("some/model", True), ("other/model", True), ("other/model", False)]


def test_without_the_hub_s_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPart):
        find_folder("some/model")
