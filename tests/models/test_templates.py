"""The arithmetic of templates, and what strangers' values may not do to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import BadModel
from tonnage.models.templates import evaluate, names_in

VALUES = {"a": 12, "b": 5, "part.c": 2, "words": ["x", "y"], "nothing": None, "ratio": 2.5, "name": "gated-gelu"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a", 12),
        ("a * part.c", 24),
        ("a // b", 2),
        ("a % b", 2),
        ("a - -b", 17),
        ("int(a * ratio)", 30),
        ("ceil(a / b)", 3),
        ("max(a, b) + min(a, b)", 17),
        ("part.c ** 3", 8),
        ("words[1] == 'y'", True),
        ("'x' in words and not (nothing is not None)", True),
        ("'x' in nothing", False),
        ("'gated' in name", True),
        ("nothing is None or nothing > 3", True),
        ("nothing is not None and nothing > 3", False),
        ("a >= b", True),
        ("len(words)", 2),
    ],
)
def test_values(text, value):
    assert evaluate(text, VALUES.get) == value


@pytest.mark.parametrize(
    "text", ["a * nothing", "a // (b - 5)", "words[7]", "a + name", "a * words", "(a ** 16) ** 16", "int(name)"]
)
def test_what_makes_no_sense_names_its_fields(text):
    with pytest.raises(BadModel) as error:
        evaluate(text, VALUES.get)
    assert any(repr(name) in str(error.value) for name in names_in(text))


def test_names():
    assert names_in("max(a, part.c) * words[i] + int(b)") == {"a", "part.c", "words", "i", "b"}


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_arithmetic_is_python_s_or_refused(a, b):
    for sign in ("+", "-", "*", "//", "%"):
        text = f"a {sign} b"
        try:
            expected = eval(text, {"a": a, "b": b})
        except ZeroDivisionError:
            with pytest.raises(BadModel):
                evaluate(text, {"a": a, "b": b}.get)
        else:
            assert evaluate(text, {"a": a, "b": b}.get) == expected
