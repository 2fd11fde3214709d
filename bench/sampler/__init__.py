"""Completions through the sampler's engines beside the bare engines; see ``bench.sampler.__main__``."""
