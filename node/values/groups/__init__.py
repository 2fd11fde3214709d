"""Groups as values: the lease, the completions, what any group must meet, and what became of it."""
