"""Model layers that use less memory, or run faster."""
