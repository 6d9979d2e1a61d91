"""KV events: what becomes of cached blocks, told to routers that send requests where their prefix is."""
