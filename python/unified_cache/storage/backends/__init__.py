"""Storage engines, one a file; imported only when a URL names them."""
