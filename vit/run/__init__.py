"""One run, from typed options to a finished folder."""
