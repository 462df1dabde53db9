"""Imported by verl through the entry point `verl.plugins`; the import registers the catalogue.

Where WINDAGE_RECORD names a folder, verl's v1 trainers record their batches there.
"""

from windage.llm.adapters.verl import register
from windage.llm.record.verl import when_asked

when_asked()
register()
