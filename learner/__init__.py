"""The learner: groups in, gradient steps, policy versions out."""
