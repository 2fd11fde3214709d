"""`heterorl-node doctor`."""
