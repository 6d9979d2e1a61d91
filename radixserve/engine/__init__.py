"""The step loop, its process, and the clients that talk to it."""
