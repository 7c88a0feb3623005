"""A lock server made of several independent servers, of which a majority decides."""
