"""Moving weights: `manifest` says what a snapshot is, its hash is the version's identity; `publish` stores both. No torch here."""
