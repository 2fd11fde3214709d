"""The changes of a frame, coded with what the receiver already knows: the exponents of its own words.

An optimizer step has roughly one size, and the spacing of bfloat16 halves with the exponent: each
exponent less doubles the chance that a word changes. So a frame's words are sorted into classes by
the exponent they have in the base, and the changed ones are coded by their ranks within a class.
proto/WEIGHTS.md is the format.

Three implementations make the same bytes: the C kernel, numba, numpy. The best that is installed is
taken; node.weights.exponent_conditioned.choice says which.
"""
