"""Engines: run prompts through a model, reusing what a plan says. `hf` for Hugging Face decoders."""
