"""What the methods of maps share: one map per layer, and from maps to a row of relevance."""
