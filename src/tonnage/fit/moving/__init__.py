"""Bytes that wait on the host or on a disk, and the copies between."""
