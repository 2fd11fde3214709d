"""Checks of what a start or a run needs: one list, of which each command takes its part."""
