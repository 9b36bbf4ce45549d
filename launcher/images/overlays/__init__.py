"""Files that are laid over those of an image: a whole folder (`overlay`), or what of it has changed (`sync`)."""
