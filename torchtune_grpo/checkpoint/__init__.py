"""What is saved, so that a resumed run continues, and users can load the result elsewhere."""
