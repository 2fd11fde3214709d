"""Code that every peer shares, and the two roles without a model."""
