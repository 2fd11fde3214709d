"""What a learner needs: memory by layout of ranks, seconds, bytes on a link; arithmetic without torch."""
