"""The question in a row of the run's data, and its right answers; the same for every role and command."""
