"""Attention over the paged K/V cache: one interface, a backend for each kind of device."""
