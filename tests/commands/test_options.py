"""Flags that are not known: the closest one is named."""

import pytest

from tonnage.commands.options import Parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h200"], "unrecognized arguments: --gpu h200 (did you mean --gpus?)"),
        (["--sequence=3"], "unrecognized arguments: --sequence=3 (did you mean --seq?)"),
        (["--colour", "red"], "unrecognized arguments: --colour red\n"),
        (["extra"], "unrecognized arguments: extra\n"),
        (["--gpus"], "expected one argument"),
    ],
)
def test_what_is_not_known_is_named_with_the_closest_flag(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser("tonnage plan train")
    parser.add_argument("--gpus")
    parser.add_argument("--seq")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(words)
    assert said in capsys.readouterr().err
