"""The kinds of kernels: each module turns calls of its operators into launches, and launches into seconds on a card."""
