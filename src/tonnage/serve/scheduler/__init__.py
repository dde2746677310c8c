"""Which sequences run in the next step. Knows no torch."""
