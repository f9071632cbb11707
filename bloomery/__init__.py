"""Bloomery: an open post-training platform that people run themselves."""

__version__ = "0.1.0"
