"""Touches PyTorch's compiler first in one way after another, each in a fork that has not seen it before."""

import os
import traceback

import torch

WAYS = """
from torch._dynamo import source
import torch._dynamo.convert_frame as part; assert torch._dynamo.convert_frame.ConvertFrame is part.ConvertFrame
import torch._dynamo.decorators as part; assert torch._dynamo.disable is part.disable
import torch._dynamo.pgo as part; assert part.__spec__.origin == part.__file__
from torch._dynamo.variables.builder import TrackedFake
import functorch.compile
import torch.distributed.fsdp; import torch._dynamo.compiled_autograd
torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
"""

for way in WAYS.strip().splitlines():
    child = os.fork()
    if child == 0:
        try:
            exec(way, {"torch": torch})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed = os.waitpid(child, 0)[1] != 0
    print("failed:" if failed else "worked:", way, flush=True)
