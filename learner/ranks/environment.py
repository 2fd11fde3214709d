"""Variables that a daemon gives the ranks that it starts."""

from typing import Final

STORE_PORT: Final = "HETERORL_RANK_STORE_PORT"
"""Port on loopback where ranks meet."""

LIMIT_S: Final = "HETERORL_RANK_TIMEOUT_S"
"""Longest wait for the others."""
