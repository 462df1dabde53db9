"""Imported by verl through the entry point `verl.plugins`; the import registers the catalogue."""

from windage.llm.adapters.verl import register

register()
