"""Rollouts: leases in, graded groups of completions out."""
