"""The life of a process: bootstrap, services, stop order, systemd."""
