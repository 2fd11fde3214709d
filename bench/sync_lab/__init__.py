"""Parts of bench/sync.py: emulated links, a hub, receivers, rivals, scenarios, a report."""
