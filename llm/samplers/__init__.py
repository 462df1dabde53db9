"""Samplers: what draws responses and says under which probabilities it drew them."""
