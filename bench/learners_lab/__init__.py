"""Several learners on small tasks, merged by the learner's own formulas: see ``bench.learners``."""
