from pathlib import Path

import anyio
import pytest

from tonnage.assistant import child
from tonnage.assistant.child import Ended, run_command


def ended(folder: Path, *words: str) -> Ended:
    async def tell(seconds: float, said: str) -> None:
        pass

    figures = folder / "figures.json"
    return anyio.run(lambda: run_command([*words, f"--json={figures}"], folder=folder, figures=figures, tell=tell))


def test_figures_come_back(tmp_path: Path) -> None:
    done = ended(tmp_path, "gpu", "h100")
    assert done.status == 0 and done.figures is not None and done.figures["gpus"][0]["key"] == "h100"
    assert not child._running


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpu", "h1000"], "called 'h1000' in the catalogue"),
        (["run", "--gpu", "h100", "none.py"], "none.py"),
        (["plan", "train", "gpt2", "--sequence=3"], "unrecognized arguments: --sequence=3"),
        (["nonsense"], "nonsense"),
    ],
)
def test_what_is_wrong_is_the_command_s_own_words(tmp_path: Path, words: list[str], said: str) -> None:
    done = ended(tmp_path, *words)
    assert done.status == 2 and done.figures is None
    assert said in done.words and "usage:" not in done.words and "tonnage:" not in done.words


def test_a_fault_of_tonnage_is_told_without_its_traceback(tmp_path: Path) -> None:
    log = tmp_path / "plan-1.log"
    log.write_text('Traceback (most recent call last):\n  File "x.py", line 3, in f\nKeyError: 7\n')
    assert child._words(log) == f"This is a fault of Tonnage's own: KeyError: 7\nWhat led to it is in {log}."
