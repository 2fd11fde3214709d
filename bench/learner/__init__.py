"""The learner's step beside the least a step can be and TRL's; see ``bench.learner.__main__``."""
