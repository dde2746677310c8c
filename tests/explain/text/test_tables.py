import copy
import re
from typing import Any

import pytest

from tonnage.explain.text import tables
from tonnage.explain.text.tables import cause_texts_of, frameworks_of, messages_of, operators_of

MESSAGE = {
    "id": "x", "speaker": "X", "pattern": "x", "cause": "capacity", "certainty": "likely",
    "says": "x", "unproved": "x", "steps": ["do x"],
}  # fmt: skip
OPERATOR = {"name": "x", "cause": "capacity", "pattern": "x", "says": "x", "steps": ["do x"]}
FRAMEWORK = {"name": "x", "mark": "x", "words": {"batch": "1"}, "advice": {"capacity": ["do x"]}}
CAUSE = {"title": "x", "unproved": "x", "steps": ["do x"]}


def with_value(row: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    changed = copy.deepcopy(row)
    table = changed
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return changed


def read(file: str, row: dict[str, Any]) -> object:
    readers: dict[str, Any] = {
        "words": lambda: messages_of({"words": [row]}),
        "places": lambda: operators_of({"operators": [row]}),
        "frameworks": lambda: frameworks_of({"frameworks": [row]}),
        "causes": lambda: cause_texts_of({"capacity": row}),
    }
    return readers[file]()


@pytest.mark.parametrize(
    ("file", "row", "path", "value", "problem"),
    [
        ("words", MESSAGE, ("steps",), "do x", r"words.toml: steps of 'x' is 'do x'"),
        ("words", MESSAGE, ("steps",), ["do x", 7], r"steps of 'x' is .*not a list of texts"),
        ("words", MESSAGE, ("says",), ["x"], r"says of 'x' is \['x'\]"),
        ("words", MESSAGE, ("certainty",), "sure", r"'sure' is no certainty"),
        ("words", MESSAGE, ("alone",), "yes", r"alone of 'x' is 'yes'"),
        ("places", OPERATOR, ("steps",), "do x", r"places.toml: steps of 'x' is 'do x'"),
        ("places", OPERATOR, ("least_share",), "0.1", r"least_share of 'x' is '0.1'"),
        ("places", OPERATOR, ("advice",), ["do x"], r"advice of 'x' is not known"),
        ("frameworks", FRAMEWORK, ("advice", "capacity"), "do x", r"advice capacity of 'x' is 'do x'"),
        ("frameworks", FRAMEWORK, ("words", "batch"), ["1"], r"the word batch of 'x' is \['1'\]"),
        ("frameworks", FRAMEWORK, ("optimizer",), "SGD", r"optimizer of 'x' is not known"),
        ("causes", CAUSE, ("steps",), "do x", r"causes.toml: steps of 'x' is 'do x'"),
        ("causes", CAUSE, ("windows_steps",), "do x", r"windows_steps of 'x' is 'do x'"),
    ],
)  # fmt: skip
def test_a_text_where_a_list_belongs_is_refused_when_a_file_is_read(
    file: str, row: dict[str, Any], path: tuple[str, ...], value: object, problem: str
) -> None:
    assert read(file, row)
    with pytest.raises(ValueError, match=problem):
        read(file, with_value(row, path, value))


def test_a_missing_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unproved of 'x' is missing"):
        read("words", {key: value for key, value in MESSAGE.items() if key != "unproved"})


def test_every_advice_is_a_sentence_in_the_words_of_every_framework() -> None:
    steps = [step for row in tables.operators() for step in row.steps]
    for cause in tables.cause_texts().values():
        steps += [*cause.steps, *cause.windows_steps]
    for framework in tables.frameworks():
        own_steps = [step for advice in framework.advice.values() for step in advice]
        for step in [*steps, *own_steps]:
            for name, value in framework.words.items():
                step = step.replace(f"{{{name}}}", value)
            assert len(step.split()) > 1, step
            assert not re.search(r"\{\w+\}", step), step


def test_every_cause_that_is_named_has_a_text() -> None:
    named = {row.cause for row in (*tables.operators(), *tables.messages())}
    named |= {cause for framework in tables.frameworks() for cause in framework.advice}
    assert named <= tables.cause_texts().keys()


def test_the_last_framework_matches_every_text() -> None:
    assert tables.frameworks()[-1].mark.search("")
