"""Objectives that are a file each: ``NAME.py`` has options, function and ``ENTRY``; its name is in the menu.

Options are checked where there is no torch, so that a file imports torch, and what needs it, inside its
function.
"""
