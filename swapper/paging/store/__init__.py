"""Where pages are stored: swap files, scratch files, and external files that are only read."""
