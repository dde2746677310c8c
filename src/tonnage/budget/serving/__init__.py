"""The memory of serving: weights, KV cache and what each engine keeps beside them."""
