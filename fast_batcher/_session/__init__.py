"""Sessions of a `DynBatcher`, from an opening to the next close. API process or host."""
