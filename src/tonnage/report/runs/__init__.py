"""Recorded runs as text and as JSON values."""
