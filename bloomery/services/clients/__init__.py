"""What SDK clients have here: `sessions` with their samplers, which `session_search` looks through, and `custom_losses` that they defined."""
