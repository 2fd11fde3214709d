"""The peers of a run: who is here, and the table that status shows of them."""
