"""Channels and servers: deadlines, limits, identity, refusals."""
