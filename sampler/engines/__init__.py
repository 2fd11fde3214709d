"""Engines: generate completions, load weights."""
