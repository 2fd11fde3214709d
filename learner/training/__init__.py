"""The loop of a learner: groups admitted, steps taken, told and replayed, orders obeyed, checkpoints made."""
