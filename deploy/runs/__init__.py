"""A run of real processes on this machine: their files, their life, what they show and promise."""
