"""Adapters: one file per family, from a recorded call to a frozen mixer."""
