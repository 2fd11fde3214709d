"""Decisions made durable: requests in turn, a commit for many, and what follows from what is on disk."""
