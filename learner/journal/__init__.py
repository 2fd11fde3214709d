"""The step journal: what a restart needs to know of the steps since the newest checkpoint."""
