"""Artifacts on disk, and which of them are offered."""
