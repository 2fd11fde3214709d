"""Gradient steps: model, loss, optimizer, checkpoint, and the loop around them."""
