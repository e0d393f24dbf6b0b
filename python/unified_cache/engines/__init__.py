"""Where the cache plugs into an engine: one module an engine, imported only by those who use it."""
