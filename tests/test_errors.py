import tonnage.errors
from tonnage.errors import TonnageError


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    classes = [c for c in vars(tonnage.errors).values() if isinstance(c, type) and issubclass(c, TonnageError)]
    drawn = tonnage.errors.__doc__ or ""
    assert [c.__name__ for c in classes if c.__name__ not in drawn] == []


def test_an_error_says_what_to_do() -> None:
    assert TonnageError("It broke.", hint="Mend it.").words == "It broke.\nMend it."
    assert TonnageError("It broke.").words == "It broke."
