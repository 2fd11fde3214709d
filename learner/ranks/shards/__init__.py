"""The parts of a model that a rank holds: slices of matrices, stages of layers."""
