"""The policy version a sampler holds: kept in step with the head, on disk and in the engine."""
