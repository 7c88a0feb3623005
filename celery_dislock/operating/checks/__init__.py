"""What doctor examines, and how: the facts that it gathers, and the checks that judge them."""
