from support import MIB, Run
from tonnage.ledger import Category
from tonnage.recording import telling_lines


def test_many_equal_pieces_come_before_one_large_one() -> None:
    run = Run()
    run.alloc(512 * MIB, Category.ACTIVATIONS, shape=(512, 1024, 1024), dtype="uint8", line="train.py:1")
    for layer in range(48):
        words = {"shape": (64, 1024, 1024), "dtype": "uint8", "module": f"layers.{layer}.mlp", "line": "train.py:2"}
        run.alloc(64 * MIB, Category.ACTIVATIONS, **words)
    first, second = run.recording.largest()
    assert (first.what, first.total_bytes) == ("48 × uint8 [64, 1024, 1024]", 48 * 64 * MIB)
    assert second.what == "uint8 [512, 1024, 1024]"


def test_a_cache_of_growing_tensors_is_one_row() -> None:
    run = Run()
    for length in range(1, 33):
        shape = (length, 1024, 1024)
        run.alloc(length * MIB, Category.KV_CACHE, shape=shape, dtype="uint8", module=f"layers.{length}", line="a.py:1")
    [group] = run.recording.largest()
    assert group.what == "32 × uint8 up to [32, 1024, 1024]"


def test_the_script_s_own_line_is_shown_where_it_tells() -> None:
    assert telling_lines([("a.py:1", ("lib/x.py:5", "a.py:1")), ("a.py:2", ("a.py:2",))]) == ["a.py:1", "a.py:2"]


def test_under_a_framework_the_deepest_line_that_differs_is_shown() -> None:
    below = ("transformers/trainer.py:9", "run.py:39")
    mlp = ("transformers/models/llama/modeling_llama.py:254", *below)
    query = ("peft/layer.py:7", "transformers/models/llama/modeling_llama.py:180", *below)
    value = ("peft/layer.py:7", "transformers/models/llama/modeling_llama.py:181", *below)
    shown = telling_lines([("run.py:39", stack) for stack in (mlp, query, value, mlp)])
    assert shown == [f"modeling_llama.py:{number}" for number in (254, 180, 181, 254)]
