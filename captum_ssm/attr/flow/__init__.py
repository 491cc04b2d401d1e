"""Relevance of the edges between tokens, layer by layer."""
