"""The words that an engine computes with, in this process or in others."""
