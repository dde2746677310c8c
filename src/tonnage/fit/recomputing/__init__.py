"""Forward passes that run again in backward."""
