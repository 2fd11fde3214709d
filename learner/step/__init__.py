"""A gradient step: its inputs, its loss, the optimizer, and the trainer on every rank that takes it."""
