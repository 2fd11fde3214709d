"""Configuration: its keys, the sources of their values, and the messages for wrong ones."""
