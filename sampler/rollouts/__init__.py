"""Leases in, groups out."""
