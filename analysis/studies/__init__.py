"""Named studies, one a module."""
