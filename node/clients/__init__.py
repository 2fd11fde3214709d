"""The clients' halves of the rpcs: membership and heartbeats, rollouts, the learner's drain."""
