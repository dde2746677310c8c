import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.errors import TonnageError
from tonnage.explain.text import explain_text, text_lines
from tonnage.report.runs.explain import print_text_diagnosis, text_figures

PIECES = [
    "CUDA out of memory. Tried to allocate ", "MPS backend out of memory (MPS allocated: ", " GiB total capacity; ",
    " already allocated; ", " free; ", " reserved in total by PyTorch)", "of which ", " is free. ", " cached)",
    "Process 12 has ", " memory in use. ", "this process has ", " is allocated by PyTorch, and ", "1.00 MiB", "0 bytes", "-3",
    "99999999999999999999 GiB", "1e5", "GPU ", 'File "a.py", line 3, in f', "Traceback (most recent call last):", "\n", "│ ",
    "Killed", "exit code 137", "KV cache", "max seq len (", ") is larger than the maximum number of tokens that can be stored in",
    "RuntimeError: CUDA error: out of memory", "x" * 500, "1/2 [", "memory: 500", "nan", "\u202e", "\x00",
    "𝟙.𝟘𝟘 GiB", "{length_count}", "%s",
]  # fmt: skip


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=25).map("".join)))
@settings(max_examples=300)
def test_no_text_raises_anything_but_a_word_of_the_house(text: str) -> None:
    import io

    try:
        found = explain_text(text_lines(io.BytesIO(text.encode("utf-8", "surrogatepass"))))
    except TonnageError as error:
        assert str(error)
        return
    printed = io.StringIO()
    print_text_diagnosis("it", found, stream=printed, verbose=True)
    json.dumps(text_figures(found))
    assert max(map(len, printed.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "\n \n\t\n",
        "Roses are red,\nviolets are blue,\nmemory fades,\nand so do you.",
        '{"loss": 0.5, "step": 12, "memory": "none"}',
        "a" * 2_000_000,
        "CUDA out of mem",
        "panic: runtime error: index out of range [5] with length 3",
        "<html><body><h1>404 Not Found</h1></body></html>",
        "TypeError: 'NoneType' object is not iterable",
        "\ufffd" * 300,
    ],
)
def test_what_tells_of_no_shortage_gets_a_clear_word(garbage: str) -> None:
    with pytest.raises(TonnageError) as raised:
        explain_text(garbage.splitlines())
    assert raised.value.hint and len(str(raised.value)) < 200


def test_what_is_proved_does_not_depend_on_the_cause() -> None:
    found = explain_text(
        ["CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 8.00 GiB total capacity; 6.00 GiB already allocated; "
         "512.00 MiB free; 6.50 GiB reserved in total by PyTorch)"]
    )  # fmt: skip
    assert "the card had 512.00 MiB too little free for this one request" in found.proves
    assert "what the program was doing: there is no traceback in the text" in found.unproved
