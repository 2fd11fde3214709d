"""The tiny model; remote engines at a stub of their server."""

from support.remote_engines import connect, engines, server
from support.torch_engines import model_dir

__all__ = ["connect", "engines", "model_dir", "server"]
