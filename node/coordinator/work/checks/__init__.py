"""Checks: groups whose rewards are worked out again, and who does it."""
