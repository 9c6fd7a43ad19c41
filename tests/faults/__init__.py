"""Switchable engine faults: the real engine with exactly one mistake patched into its code.

`python -m tests.faults NAME serve CONFIG …` takes what `python -m engine serve` takes; `--list` says what there is.
"""
