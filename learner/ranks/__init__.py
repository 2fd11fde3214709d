"""A learner of several processes, each with its part of the model, by torch's own ways to share one out."""
