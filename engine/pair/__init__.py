"""The bundled model pair: a small Qwen3 target, its DFlash drafter, and how both were made.

``paths`` and ``workload`` locate the shipped files, ``loops`` is the shared rule for degenerate text;
none of the three imports torch.  ``python -m engine.pair.train`` makes a pair, ``python -m
engine.pair.evaluate`` measures one.
"""
