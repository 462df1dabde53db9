"""Training runs, read from the folders that they write."""
