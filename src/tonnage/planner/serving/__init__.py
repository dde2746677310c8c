"""The layout of a served model over the available GPUs."""
