"""Bytes and seconds of a live training, measured block by block on the device that is there."""
