"""The remote engine: a vLLM server that its user runs, kept in step with the run by the sampler beside it."""
