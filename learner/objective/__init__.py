"""The objective: one published formula per function, nothing else."""
