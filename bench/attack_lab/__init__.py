"""A run of real processes over mutual TLS that peers with real certificates, and strangers, attack."""
