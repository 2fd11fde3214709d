"""Policy versions out: float32 masters to signed artifacts in the store."""
