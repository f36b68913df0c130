"""Charts, curves and report pages, as files without a server."""
