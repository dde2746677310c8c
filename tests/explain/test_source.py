from pathlib import Path

import pytest

from tonnage.explain.source import Source

LOOP = """
losses = []
for batch in data:
    loss = model(batch)
    {statement}
    loss.backward()
"""


def source(text: str, tmp_path: Path) -> Source:
    path = tmp_path / "train.py"
    path.write_text(text)
    found = Source.find(str(path))
    assert found
    return found


@pytest.mark.parametrize(
    "statement",
    [
        "losses.append(loss)",
        "losses.append(loss if args.leak else loss.detach())",
        "total += loss",
        "self.last[step] = loss",
        "self.history = [loss, 1]",
        "losses.append((step, loss))",
        "scaled = loss / 4; losses.append(scaled)",
    ],
)
def test_a_statement_that_keeps_the_graph_is_found(statement: str, tmp_path: Path) -> None:
    script = source(LOOP.format(statement=statement), tmp_path)
    names = script.names_backward_runs_on(6)
    assert names == {"loss"}
    keeper = script.keeper_of(names, of_graph=True)
    assert keeper and keeper.line == "train.py:5"


@pytest.mark.parametrize(
    "statement",
    [
        "losses.append(loss.item())",
        "losses.append(loss.detach())",
        "total += float(loss)",
        "print(loss)",
        "average = 0.9 * average + 0.1 * loss.item()",
        "losses.append(loss.detach().cpu())",
    ],
)
def test_a_statement_that_lets_the_graph_go_is_not(statement: str, tmp_path: Path) -> None:
    script = source(LOOP.format(statement=statement), tmp_path)
    assert script.keeper_of({"loss"}, of_graph=True) is None


def test_values_are_kept_without_their_graph_too(tmp_path: Path) -> None:
    script = source("answer = model(x)\nkept.append(answer.detach())\ntotal += answer\n", tmp_path)
    assert script.names_made_on(1) == {"answer"}
    keeper = script.keeper_of({"answer"}, of_graph=False)
    assert keeper and (keeper.line, keeper.text) == ("train.py:2", "kept.append(answer.detach())")
    script = source("total += answer\nkept.append(answer.cpu())\n", tmp_path)
    assert script.keeper_of({"answer"}, of_graph=False) is None


def test_a_line_may_keep_what_it_makes_itself(tmp_path: Path) -> None:
    script = source("x = 1\nkept.append(\n    torch.empty(7)\n)\n", tmp_path)
    keeper = script.keeper_on(3)
    assert keeper and keeper.line == "train.py:2"
    assert script.keeper_on(1) is None


def test_a_hook_that_keeps_is_found_and_one_that_does_not_is_not(tmp_path: Path) -> None:
    text = "def note(module, given, output):\n    seen.append({})\nlayer.register_forward_hook(note)\n"
    keeper = source(text.format("output"), tmp_path).keeping_hook()
    assert keeper and keeper.is_hook and keeper.line == "train.py:2"
    assert source(text.format("output.mean().item()"), tmp_path).keeping_hook() is None


def test_the_scaled_loss_of_a_mixed_precision_loop(tmp_path: Path) -> None:
    assert "loss" in source("scaler.scale(loss).backward()\n", tmp_path).names_backward_runs_on(1)


@pytest.mark.parametrize("text", ["def broken(:\n", "\0", "x = " + "(" * 500 + ")" * 500])
def test_what_cannot_be_parsed_is_no_source(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert Source.find(str(path)) is None


def test_a_script_that_is_not_there_is_no_source(tmp_path: Path) -> None:
    assert Source.find("") is None
    assert Source.find(str(tmp_path)) is None
    assert Source.find(str(tmp_path / "gone.py")) is None
    assert Source.find("/dev/zero") is None, "a recording may name anything"
