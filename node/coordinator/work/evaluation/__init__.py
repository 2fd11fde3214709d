"""Evaluation: versions that are asked held-out prompts, and their scores."""
