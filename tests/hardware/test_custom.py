from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tonnage.errors import BadGpu, TonnageError
from tonnage.hardware import find_cluster, find_cuda_gpu, find_gpu
from tonnage.hardware.custom import _KNOWN

MINE = """
name = "Prototype 48"
architecture = "sm_90"
memory_bytes = "48 GiB"
bandwidth_bytes_per_s = 2.4e12
sm_count = 96
clock_mhz = 1800
rates = { fp32 = 4.4e13, bf16 = 3.5e14 }
"""


def test_a_card_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "proto-48.toml"
    path.write_text(MINE)
    card = find_gpu(str(path))
    assert (card.key, card.name, card.memory_bytes) == ("proto-48", "Prototype 48", 48 * 2**30)
    assert card.registers_per_sm == 65536  # its architecture's
    assert card.memory_source == "given in proto-48.toml"
    assert set(card.rates) == {"fp32", "bf16"}
    assert find_cuda_gpu(str(path)).runs_cuda
    cluster = find_cluster(f"8x{path}")
    assert (cluster.gpus, cluster.gpu.key, cluster.host.key) == (8, "proto-48", "server-8")


def test_a_card_like_another(tmp_path: Path) -> None:
    path = tmp_path / "h100-64.toml"
    path.write_text('name = "H100 64"\nlike = "h100"\nmemory_bytes = 64000000000\n')
    card, h100 = find_gpu(str(path)), find_gpu("h100")
    assert card.memory_bytes == 64_000_000_000
    assert (card.rates, card.nvlink_bytes_per_s) == (h100.rates, h100.nvlink_bytes_per_s)
    assert find_cluster(f"2x8x{path}").peer_bytes_per_s == h100.nvlink_bytes_per_s
    path.write_text('name = "H100 as it is"\nlike = "h100"\n')
    assert find_gpu(str(path)).memory_source == h100.memory_source


LIKE = 'name = "x"\nlike = "h100"\n'


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        (LIKE + "memory_bytes = 24", "memory_bytes in {} is 24: not within", "79.2 GiB"),
        (LIKE + 'memory_bytes = "24 GiBB"', "'24 GiBB' is not a size", "80GiB"),
        (LIKE + 'memory_bytes = "0 GB"', "memory_bytes in {} is 0", "79.2 GiB"),
        (LIKE + "memory_bytes = 1.5e9\nsm_count = 1.5", "sm_count in {} is 1.5: not a whole number", "sm_count = 132"),
        (LIKE + "bandwith_bytes_per_s = 1e12", "a field 'bandwith_bytes_per_s'", "Did you mean bandwidth_bytes_per_s?"),
        (LIKE + "zzz = 1", "a field 'zzz'", "Known fields"),
        (LIKE + "bandwidth_bytes_per_s = 3350", "is 3,350: not within", "3350000000000.0"),
        (LIKE + "bandwidth_bytes_per_s = -1e12", "not within", "bandwidth_bytes_per_s"),
        (LIKE + "power_w = nan", "power_w in {} is nan", "power_w = 700"),
        (LIKE + "sm_count = true", "sm_count in {} is True: not a number", "sm_count = 132"),
        (LIKE + 'sm_count = "many"', "sm_count in {} is 'many': not a number", "sm_count = 132"),
        (LIKE + 'architecture = "sm_99"', "architecture in {} is 'sm_99'", "sm_90"),
        (LIKE + 'architecture = "overhead"', "architecture in {} is 'overhead'", "sm_90"),
        (LIKE + "link = 4", "link in {} is 4: not a text", 'link = "NVLink 4"'),
        (LIKE + "rates = 5", "rates in {} is 5: not a table", "rates = {"),
        (LIKE + "rates = { bf17 = 1e12 }", "rates in {} has 'bf17'", "bf16"),
        (LIKE + "rates = { bf16 = 1e12 }", "rates in {} lacks fp32", "fp32 ="),
        (LIKE + "rates = { fp32 = 67 }", "rates.fp32 in {} is 67: not within", "operations a second"),
        ('name = "x"\nlike = "other.toml"', "like in {} is 'other.toml': a file", "tonnage gpu"),
        ('name = "x"\nlike = "h300"', "no GPU called 'h300'", "h200"),
        ('like = "h100"\nname = ""', "name in {} is ''", "name ="),
        (MINE.replace("sm_count = 96", ""), "{} lacks sm_count.", "sm_count = 132"),
        ('name = "x"', "{} lacks architecture, memory_bytes", "like"),
        ("", "{} lacks name, architecture", "name ="),
        ("name = ", "{} is not TOML", "memory_bytes ="),
        ("name = " + "9" * 5000, "{} is not TOML", "memory_bytes ="),
        ("a = " + "[" * 100_000, "{} is not TOML", "memory_bytes ="),
        ("# " + "x" * 2**20, "{} holds more than 1 MiB", "ten lines"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, text: str, said: str, hint: str) -> None:
    path = tmp_path / "card.toml"
    path.write_text(text)
    with pytest.raises(TonnageError) as caught:
        find_gpu(str(path))
    assert said.format(path) in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_what_is_no_file_says_so(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "none.toml", "No such file"),
        (tmp_path, "no GPU"),
        (tmp_path / "d.toml", "directory"),
    ):
        if path.name == "d.toml":
            path.mkdir()
        with pytest.raises(TonnageError, match=said):
            find_gpu(str(path))


def test_bytes_that_are_no_text_say_so(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(BadGpu, match="is not TOML"):
        find_gpu(str(path))


VALUES = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.just("x"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.dictionaries(st.sampled_from(_KNOWN), VALUES, max_size=3))
def test_no_value_of_any_field_is_a_traceback(tmp_path: Path, fields: dict[str, object]) -> None:
    lines = [f"{field} = {str(value).lower() if value is not True else 'true'}" for field, value in fields.items()]
    lines = [line.replace("= x", '= "x"') for line in lines]
    path = tmp_path / "card.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith(("name", "like"))) + "\n" + LIKE)
    try:
        assert find_cluster(f"2x{path}").gpus == 2
    except TonnageError as error:
        assert error.hint


def test_an_unknown_card_inside_a_file_is_the_one_named(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_text('name = "x"\nlike = "h300"\n')
    with pytest.raises(TonnageError, match="no GPU called 'h300'"):
        find_cluster(f"8x{path}")
