"""Decisions: what a request comes to, and what must be on disk before anybody is told."""
