"""Slots: who may sample which prompt, and what became of each."""
