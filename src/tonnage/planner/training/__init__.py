"""The search for the fastest training that fits."""
