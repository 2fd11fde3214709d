"""Operators' orders: their verbs, what each one changes, and which hold."""
