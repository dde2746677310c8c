import torch

boxes = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda"))
degenerate = boxes[:, 2:] <= boxes[:, :2]
if degenerate.any():
    index = torch.where(degenerate.any(dim=1))[0][0]
    raise ValueError(f"All bounding boxes should have positive height and width, found {boxes[index].tolist()}")
if not torch.all(boxes > 0):
    raise ValueError("boxes must be positive")
assert torch.allclose(boxes, boxes.clone())
torch.testing.assert_close(boxes, boxes * 1.0)
torch._assert((boxes >= 0).all(), "negative")
