"""Fixture that processes of a run are forked from; tests of the command line start theirs from nothing."""

from support.warm_processes import warm_engines, warm_processes

__all__ = ["warm_engines", "warm_processes"]
