"""A torch engine of the tiny model, on each kind of device; remote engines at a stub of their server."""

from support.remote_engines import connect, engines, server
from support.torch_engines import engine, model_dir
from support.warm_processes import warm_engines

__all__ = ["connect", "engine", "engines", "model_dir", "server", "warm_engines"]
