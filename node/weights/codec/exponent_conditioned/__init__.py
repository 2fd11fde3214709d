"""The changes of a frame, coded with what the receiver already knows: the exponents of its own words.

An optimizer step has roughly one size, and the spacing of bfloat16 halves with the exponent: each
exponent less doubles the chance that a word changes. So a frame's words are sorted into classes by
the exponent they have in the base, and the changed ones are coded by their ranks within a class.
proto/WEIGHTS.md is the format.

Two implementations make the same bytes: the C kernel, on the best path that the processor has, and numpy.
node.weights.codec.exponent_conditioned.choice says which of them this process uses.
"""
