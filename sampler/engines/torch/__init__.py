"""Engines that compute with a transformers model in this process."""
