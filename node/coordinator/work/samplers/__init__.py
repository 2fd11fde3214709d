"""Samplers: what each has delivered, and how much it may hold."""
