"""The coordinator: who is in the run, who samples which prompt, and what became of every group."""
