"""Parts that benchmarks share: staging a run or a process, weighing it, models of any size."""
