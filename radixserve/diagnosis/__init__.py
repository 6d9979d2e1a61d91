"""Why a prompt missed the cache, in words."""
