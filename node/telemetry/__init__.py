"""Logs, metrics and lag of a process, and the metrics of the whole fleet."""
