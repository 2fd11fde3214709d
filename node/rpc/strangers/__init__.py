"""Connections of callers that nobody knows yet, and their places."""
