"""The relay: policy versions cached and fanned out, rollouts spooled."""
