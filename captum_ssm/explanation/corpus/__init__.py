"""Many explanations: read as one corpus."""
