import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import RequestError
from tonnage.hardware import find_gpu
from tonnage.models import all_presets, find_model
from tonnage.roofline import Bound, analyse, catalogue_ceilings, model_profile
from tonnage.roofline.items import RooflineProfile
from tonnage.roofline.layers import PHASES

LLAMA = find_model("llama-3.1-8b")
H200 = catalogue_ceilings(find_gpu("h200"))


def operations(profile: RooflineProfile, *, kind: str = "") -> float:
    return sum(item.work.operations for item in profile.items if kind in ("", item.kind))


def moved(profile: RooflineProfile, *, kind: str = "") -> float:
    return sum(item.work.moved_bytes for item in profile.items if kind in ("", item.kind))


def matrix_parameters() -> int:
    """Of all layers and the head, as matrices: no norms, no embedding."""
    layers = sum(layer.parameters - layer.norm_parameters for layer in LLAMA.decoder.layers)
    return layers + LLAMA.vocab * LLAMA.hidden


def test_a_decoded_token_reads_every_weight_once() -> None:
    profile = model_profile(LLAMA, "decode", batch=1, seq=1024)
    assert operations(profile, kind="product") == 2 * matrix_parameters()
    assert moved(profile, kind="product") == pytest.approx(2 * matrix_parameters(), rel=1e-3)


def test_a_decoded_token_reads_the_kv_cache() -> None:
    profile = model_profile(LLAMA, "decode", batch=4, seq=1024)
    cache = 4 * 1024 * 32 * 2 * 8 * 128 * 2
    assert moved(profile, kind="attention") == pytest.approx(cache, rel=0.01)


def test_training_is_three_forwards_of_products() -> None:
    """Six operations a parameter and token, the rule of thumb."""
    profile = model_profile(LLAMA, "train", batch=2, seq=512)
    assert operations(profile, kind="product") == 6 * 1024 * matrix_parameters()


@pytest.mark.parametrize(
    ("phase", "bound"), [("decode", Bound.MEMORY), ("prefill", Bound.COMPUTE), ("train", Bound.COMPUTE)]
)
def test_what_phases_are_bound_by(phase, bound: Bound) -> None:
    analysis = analyse(model_profile(LLAMA, phase, batch=1, seq=4096), H200)
    assert next(iter(analysis.seconds_by_bound())) is bound
    assert not analysis.measured


def test_a_large_batch_makes_decoding_s_products_compute_bound() -> None:
    def product(batch: int) -> Bound:
        analysis = analyse(model_profile(LLAMA, "decode", batch=batch, seq=128), H200)
        return next(row.verdict.bound for row in analysis.rows if row.item.name == "MLP down")

    assert (product(64), product(1024)) == (Bound.MEMORY, Bound.COMPUTE)


def test_a_small_model_is_bound_by_its_launches() -> None:
    analysis = analyse(model_profile(find_model("gpt2"), "prefill", batch=1, seq=128), H200)
    assert next(iter(analysis.seconds_by_bound())) is Bound.LATENCY


def test_a_mixture_reads_the_experts_that_its_tokens_reach() -> None:
    mixtral = find_model("mixtral-8x7b")

    def experts(batch: int) -> float:
        profile = model_profile(mixtral, "decode", batch=batch, seq=128)
        return sum(item.work.moved_bytes for item in profile.items if item.name == "experts down")

    layer = mixtral.decoder.layers[0]
    one_matrix = layer.feed_forward.intermediate * mixtral.hidden * 2 * len(mixtral.decoder.layers)
    assert experts(1) == pytest.approx(2 * one_matrix, rel=1e-3)
    assert experts(256) == pytest.approx(8 * one_matrix, rel=0.05)


def test_a_window_bounds_what_is_read() -> None:
    mistral = find_model("mistral-7b-v0.1")
    window = mistral.decoder.layers[0].attention.window
    assert window
    at, beyond = (
        moved(model_profile(mistral, "decode", batch=1, seq=seq), kind="attention") for seq in (window, 4 * window)
    )
    assert at == beyond


@pytest.mark.parametrize("name", sorted(all_presets()))
def test_every_preset_has_a_roofline(name: str) -> None:
    shape = find_model(name)
    for phase in PHASES:
        if phase == "decode" and not shape.decoder.causal:
            continue
        analysis = analyse(model_profile(shape, phase, batch=2, seq=256), H200)
        assert analysis.seconds > 0
        assert all(row.item.work.moved_bytes > 0 for row in analysis.rows)
        assert Bound.UNKNOWN not in analysis.seconds_by_bound()


@given(batch=st.integers(1, 512), seq=st.integers(1, 8192), phase=st.sampled_from(PHASES))
def test_more_work_never_takes_less(batch: int, seq: int, phase) -> None:
    def seconds(batch: int, seq: int) -> float:
        return analyse(model_profile(LLAMA, phase, batch=batch, seq=seq), H200).seconds

    assert seconds(batch, seq) <= min(seconds(batch + 1, seq), seconds(batch, seq + 1)) * (1 + 1e-9)


def test_what_makes_no_sense_is_said() -> None:
    with pytest.raises(RequestError, match="--batch 0"):
        model_profile(LLAMA, "train", batch=0, seq=1)
    with pytest.raises(RequestError, match="does not generate"):
        model_profile(find_model("bert-base"), "decode", batch=1, seq=1)
