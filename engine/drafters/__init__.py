"""Drafters: the interface, and one variant a file. No speculation is the empty proposal."""
