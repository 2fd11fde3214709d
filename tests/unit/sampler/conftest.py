"""A torch engine of the tiny model, on each kind of device."""

from support.torch_engines import engine, model_dir

__all__ = ["engine", "model_dir"]
