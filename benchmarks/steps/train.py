"""Run some steps of a training and say how long one takes: `python benchmarks/steps/train.py NAME [--steps 6]`.

Under `tonnage run --gpu h200` the same script is what is predicted.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from trainings import TRAININGS, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=TRAININGS)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    step = prepare(TRAININGS[arguments.name])
    for _ in range(arguments.steps):
        began_s = time.perf_counter()
        step()
        torch.cuda.synchronize()
        print(json.dumps({"step_s": time.perf_counter() - began_s}), flush=True)


if __name__ == "__main__":
    main()
