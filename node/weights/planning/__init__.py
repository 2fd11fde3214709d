"""Plans what to fetch, make and keep: chains, catch-up deltas, retention, the cost of a round trip; pure."""
