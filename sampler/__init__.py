"""The sampler: policy versions in, groups out."""
