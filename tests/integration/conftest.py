"""The run of the tiny model that most of these tests start from."""

from support.tiny_run import base, made, model_dir, same_threads_after

__all__ = ["base", "made", "model_dir", "same_threads_after"]
