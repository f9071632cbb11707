"""The product on devices that are not the processor."""
