"""Shared by examples, tools and the demo: a model, a corpus, and measurements of drives, limits and memory."""
