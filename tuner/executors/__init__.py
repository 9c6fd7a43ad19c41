"""Where trials run: one small protocol, one class per place."""
