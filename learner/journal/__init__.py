"""Checkpoints, and the steps since the newest one: a restart begins from them."""
