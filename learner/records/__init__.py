"""Records of steps for people: samples of completions, experiment trackers."""
