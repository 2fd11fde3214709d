"""Rows: the data set that the coordinator leases prompts from."""
