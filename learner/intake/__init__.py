"""Groups in: the verdict on each, the batch they make, what they say about samplers and drift."""
