"""The parts of a version: dtypes, layout, frames, digests, the signed manifest."""
