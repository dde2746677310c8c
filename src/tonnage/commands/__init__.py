"""One thin file a command; the work lives in the rooms that they call."""
