"""What the learner writes down about its steps for people: samples of completions, experiment trackers."""
