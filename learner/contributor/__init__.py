"""The contributor: takes steps for a learner that merges them, and hands them in."""
