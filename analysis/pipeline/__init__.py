"""Pipelines compared, swept and drawn; published step times; curves of score by compute."""
