"""Texts to tokens and back: tokenizer, chat template, stop strings."""
