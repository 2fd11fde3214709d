"""Texts for models and for people: digests of tokenizers, rules of tokens, plain wording."""
