"""One HTML file that says how a run went, from the files it left behind."""
