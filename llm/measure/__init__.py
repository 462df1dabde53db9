"""Bias and variance of estimators, measured on a language model."""
