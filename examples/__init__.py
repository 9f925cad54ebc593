"""Apps to run and to copy from: `quickstart` is one file, `embeddings` serves a real model."""
