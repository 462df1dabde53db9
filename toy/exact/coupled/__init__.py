"""Engines for what couples the responses of a group by a ratio (E3): cost without the group size."""
