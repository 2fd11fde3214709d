"""The built-in tasks: where the code of each one is, and its options."""
