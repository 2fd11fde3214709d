"""Every method, the same tasks, the same staleness: see ``bench.staleness``."""
