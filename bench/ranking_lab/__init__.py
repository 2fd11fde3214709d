"""Runs of a policy that ranks: through the real daemon, and at any staleness in one process."""
