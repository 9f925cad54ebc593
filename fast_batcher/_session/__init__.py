"""The asyncio implementation of `DynBatcher`. API process, the event loop's thread."""
