"""Several independent servers as one lock server, of which a majority decides."""
