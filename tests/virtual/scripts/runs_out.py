"""Asks for more than some cards have, in four steps: `how` says what it does about the error."""

import contextlib
import sys

import torch


def step(number: int) -> None:
    held.append(torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda"))
    print("step", number)


held: list = []
how = sys.argv[1] if len(sys.argv) > 1 else ""
if how == "huge":
    torch.empty(100 * 2**40, dtype=torch.uint8, device="cuda")
for number in range(4):
    if how == "catches":
        try:
            step(number)
        except torch.cuda.OutOfMemoryError:
            print("caught")
    elif how == "suppresses":
        with contextlib.suppress(RuntimeError):
            step(number)
    elif how == "exits":
        try:
            step(number)
        except Exception as error:
            print(error)
            sys.exit(3)
    else:
        step(number)
if how == "fails":
    raise ValueError("a mistake of its own")
print(
    "free",
    torch.cuda.mem_get_info()[0] < torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory,
)
