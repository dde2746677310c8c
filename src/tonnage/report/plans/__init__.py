"""Plans as text and as JSON values."""
