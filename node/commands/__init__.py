"""The command line: ``heterorl-node`` in cli.py, and one module for each of its commands."""
