"""The tiny model; remote engines at a stub of their server."""

from support.remote_engines import connect, engines, server
from support.torch_engines import model_dir
from support.warm_processes import warm_engines

__all__ = ["connect", "engines", "model_dir", "server", "warm_engines"]
