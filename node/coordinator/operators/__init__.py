"""Operators' orders as they come in: at a running coordinator, in its ledger, in older files."""
