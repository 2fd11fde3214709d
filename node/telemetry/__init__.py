"""What a peer tells of itself: lag, metrics, events, health."""
