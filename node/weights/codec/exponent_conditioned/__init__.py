"""Codes the changes of a frame by what the receiver already has: the exponents of its own words.

The steps of an optimizer have roughly one size, and the spacing of bfloat16 halves with the exponent: with
each lower exponent the chance that a word changes doubles. So a frame's words are sorted into classes by
the exponent they have in the base, and changed words are coded by their ranks within a class.
proto/WEIGHTS.md has the format.

Two implementations make the same bytes: the C kernel, on the best path the processor supports, and numpy.
``choice`` decides which of them this process uses.
"""
