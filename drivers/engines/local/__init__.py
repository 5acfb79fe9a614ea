"""Workers as processes of this host, which a fork server starts."""
