"""What the hubs, coordinator and relays, have in common: serving policy versions, taking groups in."""
