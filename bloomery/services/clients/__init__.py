"""What clients have here: `sessions` of SDKs with their samplers, which `session_search` looks through, `custom_losses` that they defined, and
`live`, which tells pages what has just changed."""
