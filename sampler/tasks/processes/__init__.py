"""The processes that run a task's code, and what they are asked."""
