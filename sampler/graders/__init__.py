"""Graders of the task ``jsonl``: a module or a folder each, known by its name because it is here.

To add a grader, write ``NAME.py`` with a subclass of ``node.grading.grader.AnswerGrader``, and say which one
it is: ``GRADER: Final = ...``. Its options and keys stand there, too. To take one away, delete it.
"""
