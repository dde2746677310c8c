"""The table of the zoo: every training under every technique, and in words what is not exact.

python tests/fit/zoo/report.py                      all of it
python tests/fit/zoo/report.py --only llama focal   trainings whose names hold one of these
python tests/fit/zoo/report.py --refusals           with the words of every refusal
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

SIGNS = {"exact": "·", "refused": "r", "no blocks": " ", "WRONG": "W", "STOPPED": "S"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--refusals", action="store_true")
    options = parser.parse_args()

    from fit.zoo.trainings import KINDS
    from fit.zoo.trial import COLUMNS, computed

    kinds = [kind for kind in KINDS if any(word in kind for word in options.only)]
    began, found = time.perf_counter(), {}
    print(*("│" * place + "┌ " + column for place, column in enumerate(COLUMNS)), sep="\n")
    with computed(dict.fromkeys(kinds, COLUMNS)) as outcomes:
        for kind in kinds:
            found[kind] = outcomes[kind].result()
            print("".join(map(_sign, found[kind].values())), "", kind, flush=True)
    _print_words(found, refusals=options.refusals)
    print(f"{len(kinds)} trainings, {time.perf_counter() - began:.0f} s")


def _sign(outcome: Any) -> str:
    if outcome.left and outcome.verdict.startswith(("exact", "refused")):
        return "L"
    return SIGNS.get(outcome.verdict.partition(":")[0], "D")


def _print_words(found: dict[str, dict[str, Any]], *, refusals: bool) -> None:
    print("\n· exact   r refused   W wrong   S stopped in a step   D died   L something left behind\n")
    for kind, row in found.items():
        for column, outcome in row.items():
            if not outcome.good or (refusals and outcome.verdict.startswith("refused")):
                print(f"{kind} | {column}: {str(outcome)[:400]}")
    outcomes = [outcome for row in found.values() for outcome in row.values()]
    exact = sum(outcome.good and outcome.verdict == "exact" for outcome in outcomes)
    refused = sum(outcome.good and outcome.verdict.startswith("refused") for outcome in outcomes)
    print(f"\n{exact} exact, {refused} refused, {sum(not outcome.good for outcome in outcomes)} neither")


if __name__ == "__main__":
    main()
