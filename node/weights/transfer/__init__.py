"""Artifacts over the network: sources, fetches, uploads, announcements."""
