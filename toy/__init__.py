"""Small problems whose bias and variance are known exactly."""
