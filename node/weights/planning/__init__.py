"""Plans what to fetch, make and keep: chains, catch-up deltas, retention, pursuit of a moving head; pure."""
