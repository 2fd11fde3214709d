"""The whole loop on one machine, from nothing to a plot, and a verdict on whether it worked."""
