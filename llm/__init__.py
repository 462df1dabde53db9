"""The same estimators on a language model."""
