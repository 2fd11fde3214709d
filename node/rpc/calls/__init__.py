"""Calls as a hub serves them: who may make which, how often, how large."""
