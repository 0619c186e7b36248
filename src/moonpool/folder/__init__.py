"""The folder that a node shares with its clients: pool, table, records, socket and session files."""
