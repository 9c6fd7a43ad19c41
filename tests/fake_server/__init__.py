"""A real process that speaks the engine's HTTP contract and misbehaves as planned."""
