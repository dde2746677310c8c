"""Choose which sequences run in the next step. Knows no torch."""
