"""What a version is: dtypes, canonical order, frames, digests, the signed manifest."""
