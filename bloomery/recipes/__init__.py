"""Training recipes: each talks to the public API through the client and fits on a few screens."""
