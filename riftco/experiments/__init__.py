"""Protocols over several models: how a LoRA rank is chosen, and what is sampled to judge a model."""
