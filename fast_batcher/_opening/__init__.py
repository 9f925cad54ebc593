"""Openings of a `DynBatcher`, each from `open` to the next close. API process or host."""
