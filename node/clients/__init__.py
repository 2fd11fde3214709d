"""The client halves of the rpcs: membership, rollouts, the drained stream."""
