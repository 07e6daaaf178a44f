"""The record of a run, and its readers: terminal, findings, page."""
