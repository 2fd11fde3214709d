"""What bench/sync.py is made of: emulated links, a hub, receivers, rivals, scenarios, a report."""
