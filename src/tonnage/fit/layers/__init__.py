"""Parts of a model computed in less memory, or faster."""
