"""The common part of hubs (coordinator and relays): serving policy versions."""
