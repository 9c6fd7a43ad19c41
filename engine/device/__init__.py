"""Decoding on a GPU: whole rounds on the device, results one round late. `round` reads like `speculate.step`."""
