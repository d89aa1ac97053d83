"""A trained model outside of training."""
