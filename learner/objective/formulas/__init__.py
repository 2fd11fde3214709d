"""Formulas of objectives: advantages, weights, trust regions, clips, divergences, discounts by age."""
