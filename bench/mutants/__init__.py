"""Faults planted in the code, to see whether the tests catch them."""
