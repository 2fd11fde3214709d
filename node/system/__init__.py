"""The machine and the interpreter: clocks, files, locks, memory, devices, packages, waits."""
