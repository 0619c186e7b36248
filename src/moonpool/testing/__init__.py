"""Test doubles and plain models that ship with Moonpool, for its own tests and for those who build on it."""
