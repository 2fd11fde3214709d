"""Who is in the run, how far behind, and what each peer has still to hear."""
