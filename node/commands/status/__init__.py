"""`heterorl-node status` and `why-stalled`."""
