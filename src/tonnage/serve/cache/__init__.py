"""The paged KV cache: the pool of blocks, the blocks of each sequence, and the pages on the device."""
