"""Replay a seed with its trace: `python -m serve.simulation SEED [BUG]`, from the `tests` folder."""

import sys
from dataclasses import fields

from serve.simulation.bugs import BUGS
from serve.simulation.run import SeedFailed, play
from serve.simulation.scenario import scenario_of


def main(arguments: list[str]) -> int:
    """The trace of one seed, with a planted bug if one is named; 1 where it fails."""
    if not 1 <= len(arguments) <= 2 or not arguments[0].isdecimal() or not set(arguments[1:]) <= set(BUGS):
        print(f"usage: python -m serve.simulation SEED [{'|'.join(BUGS)}]", file=sys.stderr)
        return 2
    scenario = scenario_of(int(arguments[0]))
    for field in fields(scenario):
        if field.name != "requests":
            print(f"{field.name:15}{getattr(scenario, field.name)}")
    try:
        play(scenario.seed, print, BUGS[arguments[1]] if arguments[1:] else None)
    except SeedFailed as failure:
        print(failure)
        return 1
    print("every sequence is done and every block is free")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
