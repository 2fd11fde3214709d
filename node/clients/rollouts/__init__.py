"""The halves of RolloutService: a sampler's, the learner's, a verifier's."""
