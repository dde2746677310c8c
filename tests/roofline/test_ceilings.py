import json
from pathlib import Path

import pytest

from tonnage.errors import BadProfile
from tonnage.hardware import all_gpus, find_gpu
from tonnage.roofline import catalogue_ceilings, read_ceilings


def written(folder: Path, **figures: object) -> Path:
    path = folder / "ceilings.json"
    path.write_text(json.dumps({"tonnage_ceilings": 1} | figures))
    return path


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.key)
def test_every_card_has_ceilings(gpu) -> None:
    ceilings = catalogue_ceilings(gpu)
    assert ceilings.memory_bytes_per_s == gpu.bandwidth_bytes_per_s
    assert 1 < ceilings.ridge(ceilings.precision) < 2000
    assert ceilings.kernel_floor_s < ceilings.launch_s


def test_the_ridge_of_an_h200() -> None:
    assert catalogue_ceilings(find_gpu("h200")).ridge("bf16") == pytest.approx(206.1, abs=0.1)


def test_a_precision_that_a_card_lacks_is_the_next_best() -> None:
    v100 = catalogue_ceilings(find_gpu("v100-16"))
    assert v100.has("bf16") == "fp16" and v100.rate("fp8") == v100.rate("fp16")
    assert v100.has("no such thing") == "fp32"


def test_measured_figures_replace_stated_ones(tmp_path: Path) -> None:
    path = written(tmp_path, gpu="NVIDIA H200", memory_bytes_per_s=4.3e12, rates={"bf16": 7.9e14})
    ceilings = read_ceilings(path)
    assert ceilings.memory_bytes_per_s == 4.3e12 and ceilings.rate("bf16") == 7.9e14
    assert ceilings.rate("fp32") == find_gpu("h200").rates["fp32"]
    assert set(ceilings.measured) == {"memory_bytes_per_s", "rates.bf16"}


def test_the_card_that_was_asked_for_wins(tmp_path: Path) -> None:
    assert read_ceilings(written(tmp_path, gpu="h200"), find_gpu("h100")).gpu == find_gpu("h100").name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON|nested too deeply"),
        ("[" * 100_000, "not JSON|nested too deeply"),
        ("[]", "holds no ceilings"),
        ('{"tonnage_ceilings": 2}', "holds no ceilings"),
        ('{"tonnage_ceilings": 1}', "does not name its card"),
        ('{"tonnage_ceilings": 1, "gpu": "h200", "memory_bytes_per_s": -1}', "memory_bytes_per_s is -1"),
        ('{"tonnage_ceilings": 1, "gpu": "h200", "launch_s": 1' + "0" * 400 + "}", "launch_s is 1000"),
        ('{"tonnage_ceilings": 1, "gpu": "h200", "launch_s": true}', "launch_s is True"),
        ('{"tonnage_ceilings": 1, "gpu": "h200", "rates": [1]}', "rates is not an object"),
        ('{"tonnage_ceilings": 1, "gpu": "h200", "rates": {"bf16": "fast"}}', "rates.bf16 is 'fast'"),
    ],
)
def test_a_file_that_makes_no_sense_says_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text(text)
    with pytest.raises(BadProfile, match=words) as caught:
        read_ceilings(path)
    assert caught.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadProfile, match="cannot be read"):
        read_ceilings(tmp_path / "none.json")
