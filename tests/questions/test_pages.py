"""Every question in the docs has a test of its answer, by a command that the page shows."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs/questions").glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_question_of_the_page_is_asked_by_a_test(page: Path) -> None:
    source = (Path(__file__).parent / f"test_{page.stem.replace('-', '_')}.py").read_text()
    asked = re.findall(r"^# Q: (.+)$", source, re.M)
    assert asked == re.findall(r"^## (.+)$", page.read_text(), re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_question_shows_a_command_and_its_output(page: Path) -> None:
    for question in re.split(r"^## ", page.read_text(), flags=re.M)[1:]:
        assert re.search(r"<!-- output.*?-->\n```\n\$ tonnage ", question), question.splitlines()[0]
