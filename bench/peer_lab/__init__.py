"""Thousands of peers in one process, each with a TLS connection and a certificate of its own."""
