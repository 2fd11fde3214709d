"""Who samples which prompt, what became of it, and how many more groups may be leased."""
