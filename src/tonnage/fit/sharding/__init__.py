"""A training over several ranks: FSDP2 under `fit`, and what keeps the ranks of one mind. DeepSpeed runs beside it."""
