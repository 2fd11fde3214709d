"""The page of a run: served live at a process's telemetry port, or written to a file by ``report``."""
