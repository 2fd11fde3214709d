"""A run of real processes that are killed without warning, and an independent witness of what they claim."""
