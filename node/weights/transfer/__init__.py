"""Moves artifacts over the network: sources, fetches, uploads, announcements."""
