"""Predict whether a whole training survives on a card: every step of the real data loader, through one allocator.

`running` runs the script on a virtual GPU without a limit; `memo` replays calls with known shapes instead of running
them again; `program` is the resulting sequence of memory events; `replay` runs an allocator through it;
`certificate` interprets the outcome.
"""
