"""Requests of members: messages to values, checks at the door, answers. Decisions are in ``work``."""
