"""Scheduler and blocks against a fake GPU, with faults, from a seed.

    story.py       the model: the next token is a hash of the tenant and all tokens before it, so every answer is known ahead
    device.py      the fake GPU: what was really written into each block, in the order in which steps were launched
    pool.py        the real pool, told to fail now and then, and watched for what it publishes
    scenario.py    what one seed decides: sizes, limits, requests, and how often each fault strikes
    invariants.py  what must hold after every call, whatever happened before
    run.py         the loop of an engine that is one step ahead, the faults, then quiet until the last sequence is done
    bugs.py        mistakes on purpose, each of which must be caught

A seed that fails replays, with a trace, from the `tests` folder: `python -m serve.simulation SEED`.
"""
