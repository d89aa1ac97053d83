"""Numbers about a model."""
