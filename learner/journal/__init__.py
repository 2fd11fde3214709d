"""What a restart begins from: a checkpoint, and the steps since then."""
