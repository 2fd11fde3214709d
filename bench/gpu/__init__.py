"""Everything that is measured on one GPU, by one command; see ``bench.gpu.__main__``."""
