"""Bytes and speed of weight deltas, ours and what others send; see ``bench.weights.__main__``."""
