"""gRPC channels and servers: addresses, deadlines, limits, caller identity, refusals."""
