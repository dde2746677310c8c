"""Reporters: a recording goes in, one output comes out."""
