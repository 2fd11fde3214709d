"""The life of a process: preflight checks, bootstrap, services, stop order, telemetry over HTTP, systemd."""
