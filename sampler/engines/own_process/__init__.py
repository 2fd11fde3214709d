"""An engine in a process of its own, which can be killed when it hangs and may die without its sampler."""
