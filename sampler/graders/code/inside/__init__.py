"""Code that runs within the sandbox. Imports nothing but the standard library and its own modules."""
