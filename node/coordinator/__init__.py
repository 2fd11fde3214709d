"""The coordinator: who is alive, who works on what, how much more to sample."""
