"""Samplers that cheat in runs of real processes: about rewards, about tokens, or with other weights."""
