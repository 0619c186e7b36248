"""What travels over a connection: frames, messages, versions."""
