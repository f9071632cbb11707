"""One folder per contract; each exposes `router`."""
