"""What a version is: dtypes, layout, frames, digests, the signed manifest."""
