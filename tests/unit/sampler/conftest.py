"""A torch engine of the tiny model, on each kind of device; remote engines at a stub of their server."""

from support.remote_engines import connect, engines, server
from support.torch_engines import engine, model_dir

__all__ = ["connect", "engine", "engines", "model_dir", "server"]
