"""The life of a coordinator: it stands by, takes over, opens what it keeps of its run, serves, ends."""
