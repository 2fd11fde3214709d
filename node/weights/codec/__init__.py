"""Codes frames of words as payloads, and decodes them."""
