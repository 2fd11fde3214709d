"""Formulas of merging: tensors and numbers in, tensors and numbers out."""
