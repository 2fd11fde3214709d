"""How a change of masters becomes bytes and back. Pure: no clock, no file, no socket."""
