"""PYTORCH_ALLOC_CONF: PyTorch's grammar, limits and words; where torch is installed, against its own parser."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.allocator import AllocatorSettings, BadAllocatorSettings
from tonnage.allocator.settings import SIZE_MAX

MIB = 2**20


def test_defaults_are_pytorchs() -> None:
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings().as_snapshot() == {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(2**i): 0 for i in range(16)},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_split_size_mb:128", {"max_split_bytes": 128 * MIB}),
        ("max_split_size_mb:-1", {"max_split_bytes": SIZE_MAX // MIB * MIB}),
        ("max_split_size_mb,30x", {"max_split_bytes": 30 * MIB}),
        ("garbage_collection_threshold:0.8", {"garbage_collection_threshold": 0.8}),
        ("garbage_collection_threshold:0x.8", {"garbage_collection_threshold": 0.5}),
        (" expandable_segments : True ,", {"expandable_segments": True}),
        ("expandable_segments:True,expandable_segments:False", {"expandable_segments": False}),
        ("roundup_power2_divisions:8", {"roundup_power2_divisions": (8,) * 16}),
        ("roundup_power2_divisions:[4:2,16:0,>:8]", {"roundup_power2_divisions": (2, 2, 2, 0, 0, *[8] * 11)}),
        ("backend:cudaMallocAsync", {"backend": "cudaMallocAsync"}),
        ("release_lock_on_hipmalloc:True", {"release_lock_on_cudamalloc": True}),
        ("pinned_num_register_threads:8", {"pinned_num_register_threads": 8}),
        ("pinned_reserve_segment_size_mb:16", {"pinned_reserve_segment_bytes": 16 * MIB}),
        ("per_process_memory_fraction:0.5", {"memory_fraction": 0.5}),
        (
            "max_split_size_mb:40,large_segment_size_mb:40",
            {"max_split_bytes": 40 * MIB, "large_segment_bytes": 40 * MIB, "max_non_split_rounding_bytes": 40 * MIB},
        ),
    ],
)
def test_values(text: str, expected: dict) -> None:
    parsed = AllocatorSettings.parse(text)
    assert {name: getattr(parsed, name) for name in expected} == expected
    assert parsed.text == text


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("max_split_size_mb:19", ValueError, "CachingAllocator option max_split_size_mb too small, must be >= 20"),
        ("max_split_size_mb:x", ValueError, "stoull"),
        ("max_split_size_mb:99999999999999999999", IndexError, "stoull"),
        ("max_split_size_mb", RuntimeError, "Index out of bounds in ConfigTokenizer"),
        ("max_split_size_mb=30", ValueError, "Unrecognized key 'max_split_size_mb=30' in"),
        ("max_non_split_rounding_mb:1", ValueError, "max_non_split_rounding_mb too small, must be >= 20"),
        ("large_segment_size_mb:10", ValueError, "CachingAllocator option large_segment_size_mb must be > 10 MB"),
        ("garbage_collection_threshold:1", ValueError, "garbage_collect_threshold is invalid, set it in (0.0, 1.0)"),
        ("garbage_collection_threshold:.", ValueError, "stod"),
        ("garbage_collection_threshold:1e999", IndexError, "stod"),
        ("roundup_power2_divisions:3", ValueError, "For roundups, the divisions has to be power of 2 "),
        ("roundup_power2_divisions:[64:3]", ValueError, "power of 2 or 0 to disable roundup"),
        ("roundup_power2_divisions:[63:4]", ValueError, "For roundups, the intervals have to be power of 2 "),
        ("roundup_power2_divisions:[64:4", RuntimeError, "Index out of bounds in ConfigTokenizer"),
        ("expandable_segments:true", ValueError, "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got"),
        ("expandable_segments:True,speed:11", ValueError, "Unrecognized key 'speed' in"),
        ("backend:mine", ValueError, "Unknown allocator backend, options are native and cudaMallocAsync"),
        ("backend:[native", RuntimeError, "Expected closing bracket ']'"),
        ("pinned_num_register_threads:3", ValueError, "Number of register threads has to be power of 2, got 3"),
        ("pinned_num_register_threads:256", ValueError, "should be less than or equal to 128, got 256"),
        ("pinned_reserve_segment_size_mb:0", ValueError, "Pinned reserve segment size has to be greater than 0"),
        ("per_process_memory_fraction:2", ValueError, "per_process_memory_fraction is invalid, set it in [0.0, 1.0]"),
    ],
)
def test_errors_are_pytorchs(text: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(BadAllocatorSettings) as caught:
        AllocatorSettings.parse(text)
    assert words in str(caught.value)
    assert caught.value.pytorch_type is kind


@pytest.mark.parametrize("text", ["throw_on_cudamalloc_oom:True", "pinned_max_cached_size_mb:8"])
def test_options_are_known_since_a_version(text: str) -> None:
    assert AllocatorSettings.parse(text, torch_version=(2, 13)).text == text
    with pytest.raises(BadAllocatorSettings, match="Unrecognized key"):
        AllocatorSettings.parse(text, torch_version=(2, 11))


def test_the_older_variable_goes_first() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:50"}
    assert AllocatorSettings.from_environment(environ).text == "max_split_size_mb:50"
    del environ["PYTORCH_CUDA_ALLOC_CONF"]
    assert AllocatorSettings.from_environment(environ).expandable_segments
    assert AllocatorSettings.from_environment({}) == AllocatorSettings()


def test_a_change_starts_some_options_over_and_keeps_others() -> None:
    before = AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.5")
    after = before.changed_by("pinned_use_background_threads:True")
    assert after.expandable_segments
    assert (after.max_split_bytes, after.garbage_collection_threshold) == (SIZE_MAX, 0.0)


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [(1, 0, 512), (513, 0, 1024), (1200, 4, 1536), (2049, 4, 2560), (1 << 21, 4, 1 << 21), ((1 << 21) + 1, 2, 3 << 20)],
)
def test_rounding(size: int, divisions: int, rounded: int) -> None:
    assert AllocatorSettings(roundup_power2_divisions=(divisions,) * 16).rounded_bytes(size) == rounded


def test_what_is_not_modelled_is_told() -> None:
    assert AllocatorSettings.parse("expandable_segments:True").not_modelled == {}
    assert list(AllocatorSettings.parse("backend:cudaMallocAsync").not_modelled) == ["backend:cudaMallocAsync"]


KEYS = [
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "large_segment_size_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "expandable_segments",
    "pinned_use_background_threads",
]
VALUES = ["True", "False", "true", "0", "1", "4", "3", "12", "20", "64", "0.5", "1e-3", "-1", "x", ">", "0x.8", "inf"]
TOKENS = st.sampled_from(KEYS) | st.sampled_from(VALUES) | st.sampled_from([",", ":", "[", "]", " "])
PAIRS = st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)).map(":".join)
LISTS = st.lists(st.tuples(st.sampled_from(VALUES), st.sampled_from(VALUES)).map(":".join), max_size=4)
TEXTS = (
    st.lists(PAIRS, max_size=3).map(",".join)
    | LISTS.map(lambda entries: f"roundup_power2_divisions:[{','.join(entries)}]")
    | st.lists(TOKENS, max_size=8).map("".join)
)


@pytest.fixture(scope="module")
def torch_parses():
    """torch's own parser of the options that all accelerators share; its words, or None."""
    core = pytest.importorskip("torch")._C
    if not hasattr(core, "_accelerator_setAllocatorSettings"):
        pytest.skip("this torch has no parser of its own to ask")

    def parse(text: str) -> tuple[type[Exception], str] | None:
        core._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        try:
            core._accelerator_setAllocatorSettings(text)
        except Exception as error:
            return type(error), str(error)
        return None

    yield parse
    core._accelerator_setAllocatorSettings("large_segment_size_mb:20,expandable_segments:False")


@settings(max_examples=400)
@given(text=TEXTS)
def test_as_torch_itself_parses(torch_parses, text: str) -> None:
    """A key that torch without CUDA skips as unknown is the one thing that is not compared."""
    theirs = torch_parses(text)
    try:
        AllocatorSettings.parse(text)
        ours = None
    except BadAllocatorSettings as error:
        ours = error
    if ours is not None and "Unrecognized key" in str(ours):
        return
    assert (ours is None) == (theirs is None), (ours, theirs)
    if ours is not None and theirs is not None:
        assert ours.pytorch_type is theirs[0]
        assert str(ours) in theirs[1]
