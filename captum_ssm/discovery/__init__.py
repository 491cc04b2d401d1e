"""A mixer that nobody registered, found by what it computes."""
