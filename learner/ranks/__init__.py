"""A learner of several processes, each with its part of the model: torch's FSDP2, tensor and pipeline parallelism."""
