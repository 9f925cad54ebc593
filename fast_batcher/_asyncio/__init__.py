"""The asyncio shell of `DynBatcher`. API process, the event loop's thread."""
