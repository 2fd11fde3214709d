"""Who is in the run, how far behind each peer is, and which verdicts it has not heard."""
