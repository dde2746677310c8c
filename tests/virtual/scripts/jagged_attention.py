import sys

import torch
import torch.nn.functional as F

dtype = getattr(torch, sys.argv[1])
rows = [torch.randn(length, 8 * 64) for length in (37, 120, 5)]
x = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda", dtype=dtype, requires_grad=True)
heads = x.unflatten(-1, (8, 64)).transpose(1, 2)
F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).values().sum().backward()
print(torch.cuda.max_memory_allocated())
