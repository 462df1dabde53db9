"""Readers of other frameworks' dumps: rows in are rows kept and rows set aside, always."""
