"""Configuration: its keys, where their values come from, and what is said of a wrong one."""
