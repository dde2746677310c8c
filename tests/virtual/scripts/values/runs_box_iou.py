import torch
def generalized_box_iou(boxes1, boxes2):
    assert (boxes1[:, 2:] >= boxes1[:, :2]).all()
    assert (boxes2[:, 2:] >= boxes2[:, :2]).all()
    return torch.max(boxes1[:, None, :2], boxes2[:, :2])
b = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda"))
generalized_box_iou(b, b)
