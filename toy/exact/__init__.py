"""Engines that compute the exact mean and variance of an estimator."""
