"""Frames of words to payloads and back."""
