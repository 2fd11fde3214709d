"""A pretrained model trained across real processes on this machine, its promises checked at the end."""
