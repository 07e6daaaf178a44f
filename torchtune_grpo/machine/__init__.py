"""The machine: ranks, signals, devices, memory and threads."""
