"""Samplers that draw honestly and lie about rewards, in runs of real processes."""
