"""Target and draft transformers: own code over plain safetensors."""
