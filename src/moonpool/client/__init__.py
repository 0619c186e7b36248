"""The client: puts, gets, views and lookups against one node."""
