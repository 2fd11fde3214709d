"""The model in training: loaded, scored, shared out between ranks."""
