"""The commands on a live run: parse, call, print."""
