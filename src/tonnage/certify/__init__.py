"""Says whether a whole training survives on a card: every step of the real data loader, through one allocator.

`running` runs the script on a virtual GPU without a limit; `memo` replays calls of shapes that have been seen instead of running
them again; `program` is the sequence of memory events that comes out; `replay` lets an allocator live through it; `certificate`
says what that means.
"""
