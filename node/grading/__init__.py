"""Graders: what one is, which there are, and the options of the task whose answers they grade."""
