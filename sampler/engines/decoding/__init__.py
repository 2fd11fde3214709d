"""Decoding in the torch engine: rows of a batch, their cache, and what is drawn for them."""
