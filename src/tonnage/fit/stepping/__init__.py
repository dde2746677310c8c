"""Turn a batch into gradients, and gradients into parameter updates."""
