"""The objectives: a file each, ``NAME.py``, with options, function and ``ENTRY``; or in one of ``families``.

Options are checked where there is no torch, so that a file imports torch, and what needs it, inside its
function.
"""
