"""Attention over the paged KV cache: the interface, and one variant a file."""
