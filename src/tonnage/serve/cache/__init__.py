"""The paged KV cache: the block pool, block tables of sequences, and the pages on the device."""
