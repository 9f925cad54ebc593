"""Sentence embeddings over HTTP: the model, the app around it, and a demonstration of its speed."""
