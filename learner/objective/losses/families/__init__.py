"""Objectives that share code with their kin; their options are in ``objective.options``."""
