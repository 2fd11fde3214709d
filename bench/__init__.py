"""Measurements: what the claims of this repository rest on."""
