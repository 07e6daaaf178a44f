"""What a run records, and its readers: terminal, findings, page."""
