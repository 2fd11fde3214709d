"""The stream between a contributor and the learner that merges what it hands in."""
