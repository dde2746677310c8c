import torch

matrix = torch.eye(8, device="cuda").to_sparse()
torch.sparse.mm(matrix, torch.ones(8, 8, device="cuda"))
