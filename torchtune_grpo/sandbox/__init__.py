"""Processes that can be killed with all that they started, for rewards that run foreign code.

Nothing here imports torch: the processes start in milliseconds and hold nothing worth stealing.
"""
