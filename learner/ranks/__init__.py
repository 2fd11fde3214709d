"""A learner of several processes, each with its part of the model: torch's FSDP2 and tensor parallelism."""
