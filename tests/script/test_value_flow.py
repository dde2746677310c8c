"""What depends on values that a program read, found in its source: tests, errors and loops."""

import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tonnage.script.value_flow import Cause, Flow, Read

_numbers = count()


class Reads:
    """What a program reads, and where it did."""

    def __init__(self, value: Any, kind: str) -> None:
        self._value, self._kind = value, kind
        self.found: list[Read] = []

    def __call__(self) -> Any:
        places: list[tuple[Any, int]] = []
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != __file__:
            places.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        self.found.append(Read(tuple(places), self._kind))
        return self._value


def run(text: str, folder: Path, value: Any = 1.0, kind: str = "float") -> tuple[list[Read], BaseException | None]:
    """Run a program, which reads with `read()`; return what it read, and its error."""
    file = folder / f"program{next(_numbers)}.py"
    file.write_text(text)
    reads = Reads(value, kind)
    try:
        exec(compile(text, str(file), "exec"), {"read": reads})
    except (Exception, SystemExit) as error:
        return reads.found, error
    return reads.found, None


def cause(text: str, folder: Path, value: Any = 1.0, kind: str = "float") -> Cause | None:
    """Why a program failed, if it was by what it read."""
    reads, error = run(text, folder, value, kind)
    assert error is not None, "the program must fail"
    return Flow(reads).cause_of(error, (__file__,))


DEPENDENT = {
    "an assertion": "assert read() < 0.5",
    "a name": "x = read()\ny = 2 * x\nif y > 1:\n    raise ValueError",
    "a result": "def loss():\n    return read() + 1\nassert loss() < 1",
    "a branch's result": "def bad():\n    if read() > 0.5:\n        return True\n    return False\nassert not bad()",
    "an argument": "def check(x):\n    if x > 0.5:\n        raise ValueError\ncheck(read())",
    "a keyword": "def check(*, x=0, y=0):\n    if x > 0.5:\n        raise ValueError\ncheck(y=1, x=read())",
    "arguments passed on": "def f(x):\n    assert x < 0.5\ndef g(*args, **more):\n    return f(*args, **more)\ng(read())",
    "a list": "losses = []\nfor _ in range(3):\n    losses.append(read())\nassert sum(losses) < 1",
    "a dictionary": "seen = {}\nseen['loss'] = read()\nif seen['loss'] > 0.5:\n    raise ValueError",
    "an attribute": "class A:\n    def see(self, x):\n        self.best = x\n    def ask(self):\n        assert self.best < 0\n"
    "a = A()\na.see(read())\na.ask()",
    "a count under a test": "bad = 0\nfor _ in range(5):\n    if read() > 0.5:\n        bad += 1\nassert bad < 3",
    "a loop's end": "for _ in range(3):\n    if read() < 0.5:\n        break\nelse:\n    raise ValueError",
    "a loop's rounds": "i = 0\nwhile read() > 0.5:\n    i += 1\n    if i > 3:\n        raise ValueError",
    "an early return": "def f():\n    if read() < 0.5:\n        return 1\n    raise ValueError\nf()",
    "a helper that raises": "def fail():\n    raise ValueError\nif read() > 0.5:\n    fail()",
    "an exit": "import sys\nif read() > 0.5:\n    sys.exit(1)",
    "an error from another": "try:\n    assert read() < 0\nexcept AssertionError as e:\n    raise RuntimeError('wrapped') from e",
    "an or": "ok = False\nok or read() < 0.5 or exit(1)",
    "a division": "zero = read() - 1\nprint(1 / zero)",
    "a logarithm": "import math\nmath.log(read() - 1)",
    "a walrus": "if (x := read()) > 0.5:\n    raise ValueError(x)",
    "a match": "match read():\n    case 1.0:\n        raise ValueError",
    "a lambda": "f = lambda: read() > 0\nassert not f()",
    "a comprehension": "assert not [x for x in [read()] if x > 0]",
}

OWN = {
    "no test of it": "read()\nraise ValueError",
    "another test": "x = read()\nepochs = 0\nif epochs < 1:\n    raise ValueError",
    "a name that there is not": "if read() > 0.5:\n    print(nothing)",
    "a type": "print('loss ' + read())",
    "a missing key": "found = {'loss': read()}\nfound['accuracy']",
    "a missing file": "best = read()\nopen(f'/nowhere/{best}.pt')",
    "an import": "if read() > 0.5:\n    import no_such_module_at_all",
    "another divisor": "total, batches = read(), 0\ntotal / batches",
    "a check inside": "def save(to):\n    if not to:\n        raise ValueError\nif read() > 0.5:\n    save('')",
    "a break before": "def f():\n    for _ in range(3):\n        if read() > 0.5:\n            break\n    raise ValueError\nf()",
    "a length": "losses = [read()]\nif len(losses) < 2:\n    raise ValueError",
    "what is none": "x = read()\nif x is not None:\n    raise ValueError",
    "another argument": "def f(a, b):\n    if b < 1:\n        raise ValueError\nf(read(), 0)",
    "a text": "name = f'{read():.2f}'\nif not name.endswith('x'):\n    raise ValueError",
    "in a loop by it": "while read() > 0.5:\n    data = {}\n    if 'x' not in data:\n        raise ValueError",
    "no body at all": "read()\nint('x')",
}


@pytest.mark.parametrize("what", DEPENDENT)
def test_an_error_by_a_value_that_was_read_is_found(what: str, tmp_path: Path) -> None:
    found = cause(DEPENDENT[what], tmp_path)
    assert found is not None and found.file.startswith(str(tmp_path))


@pytest.mark.parametrize("what", OWN)
def test_any_other_error_is_the_programs_own(what: str, tmp_path: Path) -> None:
    assert cause(OWN[what], tmp_path) is None


def test_sizes_depend_on_whole_numbers(tmp_path: Path) -> None:
    sized = "n = read()\nrows = list(range(8))[:n]\na, b = rows"
    assert cause(sized, tmp_path, 3, "int") is not None
    assert cause(sized.replace("[:n]", ""), tmp_path, 3, "int") is None


def test_the_line_and_the_way_are_told(tmp_path: Path) -> None:
    found = cause("x = read()\n\nassert x < 0", tmp_path)
    assert found and (found.line, found.how) == (3, "assert")
    found = cause("import sys\nif read():\n    sys.exit('bad')", tmp_path)
    assert found and (found.line, found.how) == (3, "exit")


@pytest.mark.parametrize(
    ("text", "decided"),
    [
        ("if read() > 2:\n    pass", ("if", 1)),
        ("x = read()\nprint(x)\nif x > 2:\n    pass", ("if", 3)),
        ("def f():\n    return read()\nwhile f() > 2:\n    pass", ("while", 3)),
        ("y = 1 if read() > 2 else 3", ("if", 1)),
        ("print(read())", None),
        ("losses = []\nlosses.append(read())\nif len(losses) > 2:\n    pass", None),
    ],
)
def test_the_test_that_a_value_decides_is_named(text: str, decided: tuple[str, int] | None, tmp_path: Path) -> None:
    (read,), error = run(text, tmp_path)
    assert error is None
    found = Flow([read]).decides(read)
    assert (found and (found[0], found[2])) == decided
    assert Flow([read], is_quick=True).decides(read) == found


def test_a_method_is_looked_at_by_itself(tmp_path: Path) -> None:
    text = "import sys\nclass A:\n    def ask(self, n):\n        x = read()\n        if x > n:\n            pass\nA().ask(5)"
    (read,), _ = run(text, tmp_path)
    found = Flow([read], is_quick=True).decides(read)
    assert found and (found[0], found[2]) == ("if", 5)


ENDLESS = {
    "its test": "while read() > 0.5:\n    {stop}",
    "a name": "x = read()\nwhile x > 0.5:\n    x = read()\n    {stop}",
    "a break": "while True:\n    x = read()\n    {stop}\n    if x < 0.5:\n        break",
    "a return": "def f():\n  while True:\n    for _ in [1]:\n      if read() < 0.5:\n        return\n    {stop}\nf()",
    "a call": "def step():\n    return read()\nwhile not step() < 0.5:\n    {stop}",
    "either": "import itertools\nfor _ in itertools.count():\n    if read() < 0.5:\n        break\n    {stop}",
}
ENDING = {
    "a count": "n = 0\nwhile read() > 0.5 and n < 3:\n    n += 1",
    "another break": "n = 0\nwhile read() > 0.5:\n    n += 1\n    if n > 3:\n        break",
    "a range": "for _ in range(3):\n    if read() < 0.5:\n        break",
    "any break": "n = 0\nwhile True:\n    n += 1\n    if read() < 0.5 or n > 3:\n        break",
    "no test of it": "n = 0\nwhile n < 3:\n    n += 1\n    print(read())",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_loop_that_only_a_value_can_end_is_found(what: str, tmp_path: Path) -> None:
    reads, _ = run(ENDLESS[what].format(stop="len(__import__('sys').argv) > 9999 or 1 / 0"), tmp_path)
    assert Flow(reads).is_endless(reads[-1]) is not None


@pytest.mark.parametrize("what", ENDING)
def test_a_loop_with_another_end_is_not_endless(what: str, tmp_path: Path) -> None:
    reads, error = run(ENDING[what], tmp_path)
    assert error is None and reads
    assert Flow(reads).is_endless(reads[-1]) is None


def test_frames_without_source_are_no_obstacle() -> None:
    space: dict[str, Any] = {"read": Reads(1.0, "float")}
    try:
        exec(compile("assert read() < 0", "<nowhere>", "exec"), space)
    except AssertionError as error:
        assert Flow(space["read"].found).cause_of(error, (__file__,)) is None
