"""Train over several ranks: FSDP2 under `fit`, and coordination of the ranks. DeepSpeed is supported alongside."""
