"""A whole run on one machine, from an empty directory to a plot and a check of every promise."""
