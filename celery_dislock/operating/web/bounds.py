"""What a page accepts, and the server in front of it as well."""

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # the names of this machine in a URL
BODY_MOST = 16 * 1024  # bytes of a form
