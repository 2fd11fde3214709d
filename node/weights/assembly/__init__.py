"""Puts versions together: words to coded frames, and payloads back to words."""
