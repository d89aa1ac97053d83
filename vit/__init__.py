"""A Vision Transformer toolkit for image classification."""

__version__ = "0.1.0"
