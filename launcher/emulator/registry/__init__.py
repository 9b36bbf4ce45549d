"""Artifact Registry's own protocol. launcher/emulator/vm/image_registry.py has the names that docker pushes without
bytes."""
