"""Fixture that processes of today's code are forked from."""

from support.warm_processes import warm_processes

__all__ = ["warm_processes"]
