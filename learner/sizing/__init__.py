"""Needs of a learner: memory by layout of ranks, seconds, bytes on a link; arithmetic without torch."""
