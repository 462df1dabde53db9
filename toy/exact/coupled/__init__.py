"""Engines for what couples the responses of a group (E3): the cost is free of the group size."""
