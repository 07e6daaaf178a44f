"""The config: its keys, how it is read and checked, and how mistakes are reported."""
