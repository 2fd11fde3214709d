"""Who samples which prompt, what became of it, and how much more is wanted."""
