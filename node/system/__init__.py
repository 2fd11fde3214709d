"""What the machine and the interpreter give: clocks, files, locks, memory, devices, packages, waits."""
