"""Artifact Registry's own protocol: what clients push to it in bytes and pull from it. Names that docker only
registers, without bytes, are in launcher/emulator/vm/registry.py."""
