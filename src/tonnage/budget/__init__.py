"""The arithmetic of memory and time: formulas over a model's shape, a configuration and a card; no torch."""
