"""`heterorl-node join` and `token`."""
