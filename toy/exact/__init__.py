"""Engines that compute the mean and the variance of an estimator without sampling."""
