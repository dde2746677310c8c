from clock.kernels.calls import BF16, FP32, H200, INDEX, SETTINGS, call
from tonnage.clock.kernels import indexing

TABLE = ((50000, 1024), BF16)


def read(name: str, *arguments: object):
    return indexing.OPERATORS[name](call(name, *arguments), SETTINGS)


def test_rows_are_taken_from_a_table() -> None:
    expected = 4096 * 1024 * 2 * 2 + 4096 * 8
    alone = indexing.WHEN_ALONE["embedding"](call("embedding", TABLE, ((4096,), INDEX)), SETTINGS)
    assert alone.moved_bytes == expected
    assert read("gather", TABLE, "0", ((4096, 1024), INDEX), "", ((4096, 1024), BF16)).moved_bytes == expected
    assert read("index", TABLE, ((((4096,),)), "")).moved_bytes == expected


def test_elements_are_taken_one_by_one() -> None:
    made = read("gather", ((4096, 512), FP32), "-1", ((4096, 1), INDEX))
    assert made.variant == "taken_elements" and made.shape[0] == 4096


def test_gradients_of_an_embedding_are_sorted_when_many() -> None:
    few, many = (read("embedding_dense_backward", ((n, 768), FP32), ((n,), INDEX), "50257") for n in (1024, 8192))
    assert (few.kernels, few.variant) == (1, "embedding_backward_few") and "sorted" in many.variant
    assert indexing.seconds(many, H200) > 50e-6 > indexing.seconds(few, H200)


def test_atomic_additions_are_slower_than_copies() -> None:
    added = read("index_add", ((100000, 256), FP32), "0", ((1000000,), INDEX), ((1000000, 256), FP32))
    assert indexing.seconds(added, H200) > 2 * added.moved_bytes / H200.bandwidth_bytes_per_s


def test_accumulation_sorts_first() -> None:
    values = ((1000, 64), FP32)
    accumulated = read("_index_put_impl_", ((500, 64), FP32), "", values, "True", "False")
    assert "sorted" in accumulated.variant
    assert "sorted" not in read("_index_put_impl_", ((500, 64), FP32), "", values, "False", "False").variant


def test_an_average_takes_a_thread_for_each_number_that_it_writes() -> None:
    image = ((128, 64, 56, 56), FP32)
    whole, halved = (read("avg_pool2d", image, "[3, 3]", step, "[1, 1]") for step in ("[1, 1]", "[2, 2]"))
    assert whole.shape[0] == 4 * halved.shape[0]
    assert abs(indexing.seconds(whole, H200) / 339e-6 - 1) < 0.1  # as an H200 took
    back = read("avg_pool2d_backward", image, image, "[3, 3]", "[1, 1]", "[1, 1]")
    assert abs(indexing.seconds(back, H200) / 748e-6 - 1) < 0.1
    assert read("avg_pool2d", image, "[2, 2]", "[]").shape == read("avg_pool2d", image, "[2, 2]", "[2, 2]").shape
