"""A run as ``heterorl-node simulate`` plays it: production's decisions; modelled links, engines and steps."""
