"""The life of a process: bootstrap, services, stop order, telemetry over HTTP, systemd."""
