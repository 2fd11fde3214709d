"""What the coordinator and relays both serve: policy versions, and whose group a submission is."""
