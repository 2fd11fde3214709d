"""Held-out prompts: which version is asked them, what came back, and which version did best."""
