"""Several learners: contributors take steps, the run's learner merges them into versions."""
