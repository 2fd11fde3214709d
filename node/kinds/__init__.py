"""Kinds of policies that are not language models: a folder each, with all that the three roles need.

    __init__    KIND: how a model directory is known as one of its kind, and where the rest is
    task        OPTIONS and TASK: the task of the same name, whose rows a coordinator checks; no torch
    engine      the sampler's half
    scorer      the learner's half

The halves stand on sampler and learner and are imported by name, where such a model is loaded; nothing else
imports them. To add a kind, write its folder and name it in ``node.tasks.built_in_tasks.KINDS``.
"""
