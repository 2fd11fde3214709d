"""Streams by which groups leave: to the learner, and to verifiers and back."""
